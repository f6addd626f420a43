"""The coordinator of a pool: queue, owner table, and the steps of the running batch.

request.py    one request and the events its client sees
scheduler.py  pure: who waits, who owns, who runs, what the next step changes
startup.py    what the pool's processes report, and whether they fit together
driver.py     carries out the scheduler's decisions: reserve, prefill, steps, release
inference.py  the public service
status.py     the service that operators ask
server.py     the process

    submit -> QUEUED -> place -> PLACED: Reserve, Prefill.Run -> first token -> READY
           -> delta -> RUNNING: a token a step -> ENDED -> pages free when all ranks are past it
"""
