"""Generated from protos/tknp/v1 by `make protos`. Not edited by hand."""
