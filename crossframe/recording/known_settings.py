"""Settings of a manifest that a comparison understands. All others are for people."""

COMMAND = "command"
"""The command line that makes the recording again. `crossframe record ...` takes --output, --overwrite and --twins besides."""
PER_RANK = "per_rank_statistics"
"""Names of modules which see the other samples of their rank, as batch norm does in training."""
LOSSES, MEAN = "losses", "mean"
"""What a loop knows of its loss: where that is the mean over ranks alone, each rank has written that down."""
