"""The loop: what changes makes its service due, what is due is planned and done.

    mirrors --changed--> due[service] --> plan(snapshots) --> steps --> API server --> mirrors

One thread plans, so that no two rounds of a service overlap. A round that fails is tried again
after 1, 2, 4, ... 60 seconds, and the status says why; others go on. Without any event every
service is looked at each minute.
"""
