"""Engines, from options to what Python programs call. Each folder knows only those before it:

options/     what options say, checked before a model is looked for
load/        a model where it runs: read, placed in memory, changed in place
steps/       one engine: what may enter, its steps and the processes that run them, who hears of the tokens
running/     whole engines: built, kept in a loop, several at once, replaced after a death
interfaces/  what programs call, and what they give and get
"""
