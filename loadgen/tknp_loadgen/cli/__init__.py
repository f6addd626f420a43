"""The `tknp-load` command."""
