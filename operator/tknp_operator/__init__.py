"""The Kubernetes operator of TKNP: places a pool on nodes of a cluster and keeps it there."""
