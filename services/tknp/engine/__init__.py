"""Executes programs: one decode step on one rank.

    delta -> Batch.apply -> rows -> program (tknp.layout) -> Executor.run -> Outcome

`batch` is pure bookkeeping, equal on every rank; `executor` runs a program's operations on
tensors; `decode` ties both to a rank's weights, pages and transport; `times` says where the seconds
of steps went.
"""
