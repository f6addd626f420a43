"""`tknp-operator`."""
