"""The coordinator of a pool: queue, owner table, and the steps of the running batch.

request.py    one request and the events its client sees
limits.py     what the pool can take: refusals of what it never could
waiting.py    pure: the order of those that wait
scheduler.py  pure: who waits, who owns, who runs, what the next step changes
startup.py    what the pool's processes report, and whether they fit together
driver.py     the life of the pool: load, warm up, serve, drain, fail
serving.py    carries out the scheduler's decisions
placing.py      for one request: reserve, prefill, release
replicas.py     which prefill replica
steps.py        for all: steps to the nodes, results back
recording.py  what the scheduler was told and decided, as a file; replay.py runs it again
inference.py  the public service
status.py     the service that operators ask
metrics.py    what it measures
server.py     the process

    submit -> QUEUED -> place -> PLACED: Reserve, Prefill.Run -> first token -> READY
           -> delta -> RUNNING: a token a step -> ENDED -> pages free when all ranks are past it
    cancelled, overdue or failed anywhere -> ENDED; from PLACED and READY by a Release at the owner
    prefill replica lost: PLACED -> QUEUED, as another attempt
"""
