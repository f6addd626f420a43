"""Executes programs: decode steps on one rank, of every stream that its node takes part in.

    delta -> Batch.apply -> rows -> program (tknp.layout) -> Executor.steps -> Outcome

batch.py     the rows of a stream, equal on every rank; pure
stream.py    what one stream has on one rank: batch, own rows (owned.py), sampler states, programs
executor.py  runs a program's operations on tensors (tensors.py); those of attention whose sequences
             are divided over nodes are in sequence.py
runs.py      runs of whole layers that a rank may compute in one go
decode.py    ties streams to what a rank has once: weights, pages, transport
lanes.py     lets streams take turns on the one engine thread (thread.py)
backend.py   which implementation of the mathematics runs
times.py, recorder.py   where the seconds of steps went; what exactly a few steps did
"""
