"""What a model's text means: reasoning, answer and tool calls, from one description per format.

`describe.py` holds the small language of descriptions, `families.py` the descriptions, `parser.py` the one incremental
parser, `detect.py` the choice from a chat template. Knows no torch, no HTTP, no engine.
"""
