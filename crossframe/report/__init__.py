"""The report of a comparison: lines for a terminal, `report.json`, and one offline page.

The page needs the extra `report` (jinja2 and matplotlib); the lines do not.
"""
