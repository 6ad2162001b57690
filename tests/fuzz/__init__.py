"""Mutation fuzzing of everything that reads what others made.

    make fuzz                                every target in turn, 600 seconds each
    make fuzz TARGET=plans SECONDS=60        one of: traces, headers, loads, plans, imports, config, checkpoint, verify
    python -m tests.fuzz --target plans --case 1234      one case again, with its traceback; its files are kept

A **seed** is a small valid input, files by name (`seeds.py`). A case is a seed with one to three **mutations**
(`mutations.py`), drawn from the target's name and the case's number alone, so that a number reproduces it. Each runs in
a process of its own, forked from one that has imported everything, with a limit on memory and on time. Verdicts:

    ok          the input was read
    refused     an EplbError that names a file
    nameless    an EplbError that names no file
    netted      a trace's reader tripped (TypeError, LookupError, ...), and only the last net gave its file a name
    internal    any other exception, or a process that died
    memory      more than the limit was asked for
    hang        no answer in time

The last five are defects: their inputs are saved under `build/fuzz/TARGET/CASE-VERDICT/`, with the exception's text,
and the counts of the run in `build/fuzz/TARGET/counts.json`; with one of them the run fails. A new kind of input is a
line in `seeds.py` and, when nothing reads it yet, a function in `targets.py`.
"""
