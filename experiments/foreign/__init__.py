"""Pairs of public implementations of one architecture, neither written by this project: are they aligned and compared rightly?

See README.md. Scripts and expected answers are not edited after the commits "Freeze pairs of foreign implementations" (set 1),
"Freeze a second set of foreign pairs" (set 2) and "Freeze a third set of foreign pairs" (set 3). One correction of set 1 is of
the judging: the numbers of transposed arrays were written in another order, so that right maps of clip, gemma, qwen3, qwen3_moe
and resnet were judged wrong. Their digests in `expected.json` are new.
"""
