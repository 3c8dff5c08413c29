"""The supervisor of one machine: deadlines, caps and outcomes are decided here, outside every program."""
