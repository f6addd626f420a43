"""`tknp ...`: starts services, starts whole pools on one machine, and talks to them.

    flags > environment (TKNP_*) > pool file > defaults

Only click, rich and gRPC are imported here; a command imports its service when it runs.
"""
