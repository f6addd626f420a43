"""The Kubernetes operator of TKNP: places layer blocks and active roots on nodes, and keeps them there."""
