"""The control loop in verl's V1 trainer: installed beside verl, found by the entry point `verl.plugins`.

    plugin      what verl loads at import: waits for verl's trainers, then puts ours in their places
    trainer     verl's trainer class with the control loop behind its logger
    adapter     what the control loop sees: verl's keys and knobs by our names
    workers     what is run inside verl's worker processes, to set and to read back
    declared    the table for docs/integrations.md

Without a key `autotune` in verl's configuration nothing is changed.
"""
