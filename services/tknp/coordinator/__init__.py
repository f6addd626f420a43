"""The coordinator of a pool: queue, owner table, and the steps of the running batch.

request.py    one request and the events its client sees
limits.py     what the pool can take: refusals of what it never could
scheduler.py  pure: who waits, who owns, who runs, what the next steps change
waiting.py      the order of those that wait
placement.py    which stream and which owners
division.py     how owners divide a request, and the pages that takes
ledger.py       pages of every node
stream.py       rows and steps of one stream
growing.py      pages for requests that run, and who makes room
growth.py       where one of them gets its next page
startup.py    what the pool's processes report, and whether they fit together
driver.py     the life of the pool: load, warm up, serve, drain, fail
serving.py    carries out the scheduler's decisions
placing.py      for one request: reserve, prefill, release
owners.py       what owners are asked
replicas.py     which prefill replica
steps.py        for all: steps to the nodes, results back
recording.py  what the scheduler was told and decided, as a file; replay.py runs it again
inference.py  the public service
status.py     the service that operators ask
metrics.py    what it measures
server.py     the process

    submit -> QUEUED -> place -> PLACED: Reserve, Prefill.Run -> first token -> READY
           -> delta -> RUNNING: a token a step -> ENDED -> pages free when all ranks are past it
    cancelled, overdue or failed anywhere -> ENDED; from PLACED and READY by a Release at the owners
    prefill replica lost: PLACED -> QUEUED, as another attempt
    no page left for another: RUNNING -> PREEMPTED -> QUEUED, as another attempt
"""
