"""Prometheus metrics of every service.

table.py        every metric: name, kind, help, labels, buckets. Dashboards and docs follow it
instruments.py  counters and histograms that a step can afford
registry.py     what one process exposes: the rows of its services, read when it is scraped
http.py         GET /metrics
docs.py         the table as docs/metrics.md: `python -m tknp.metrics.docs > docs/metrics.md`

    engine thread, event loop --observe--> instruments
    state of the service <-----reader---- Registry.collect <--event loop-- GET /metrics

Nothing global: each service of a process has a registry of its own, so that many fit in one
process. Values live where they arise (a transport counts its bytes, a page pool its pages) and are
read on the event loop when somebody asks, which costs a step nothing.
"""
