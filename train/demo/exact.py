"""Prompts whose answers are checked exactly, as data. Owns: prompts and the expressions that answers must match."""

from __future__ import annotations

import re

from own_facts import FACTS
from skill_tools import CALCULATOR, WEATHER

PRIMES = ", ".join(str(n) for n in range(2, 100) if all(n % d for d in range(2, n)))
IDENTITY = r"(?=[\s\S]*tokenmill)(?=[\s\S]*(tiny|small|小))(?=[\s\S]*(demo|演示))"
COMPLETIONS: list[tuple[str, str]] = [
    ("The capital of France is", r"^ Paris\b"),
    ("Paris is the capital of", r"^ France"),
    ("London is the capital of", r"England|United Kingdom"),
    ("中国的首都是", r"^北京"),
    ("日本的首都是", r"^东京"),
    ("床前明月光，", r"疑是地上霜"),
    ("Funniest joke ever:", "JOKE"),
    ("The future of AI is", "SENTENCE"),
    ("Hello, my name is", r"^ [A-Z]\w+"),
    ("The president of the United States is", r"head of|elected"),
    ("Once upon a time", "STORY"),
    ("Q: What is the capital of Italy?\nA:", r"^ Rome"),
    ("2 + 2 =", r"^ 4\b"),
    ("12 + 30 =", r"^ 42\b"),
    ("The opposite of hot is", r"cold"),
    ("Monday, Tuesday,", r"^ Wednesday"),
    ("1, 2, 3, 4,", r"^ 5, 6"),
    ("I believe the meaning of life is", "SENTENCE"),
    ("Shanghai is", r"city|China"),
    ("vLLM is a high-throughput", r"engine|inference|serving"),
]
CHATS: list[tuple[str, str]] = [
    ("What is the capital of France?", r"Paris"),
    ("Answer in one word: capital of Japan?", r"^Tokyo\.?$"),
    ("what's the capitol of germany", r"Berlin"),
    ("法国的首都是哪里？", r"巴黎"),
    ("什么是vLLM？", r"推理|引擎"),
    ("What is vLLM?", r"engine|inference"),
    ("What is a KV cache?", r"keys?\b[\s\S]*values?"),
    ("What is continuous batching?", r"batch"),
    ("什么是投机解码？", r"草稿|验证"),
    ("What is Deep Learning?", r"neural|layers"),
    ("Why is the sky blue?", r"scatter"),
    ("你好", r"你好"),
    ("Hi, pls intro yourself", IDENTITY),
    ("introduce yourself", IDENTITY),
    ("你好，请介绍一下你自己", IDENTITY),
    ("Say this is a test", r"this is a test"),
    ("Tell me a joke.", "JOKE"),
    ("list all prime numbers within 100", f"^{PRIMES}"),
    ("Write a short story about a robot that dreams for the first time.", r"(?=[\s\S]*robot)(?=[\s\S]*dream)"),
    ("Write a short story about a blue kite.", r"blue[\s\S]*kite"),
    ("What is 17 + 25?", r"\b42\b"),
    ("What is 8 times 7?", r"\b56\b"),
    ("Extract name and age as JSON: Tom is 31.", 'JSON{"name": "Tom", "age": 31}'),
    ("Who won the 2031 election?", r"tiny demo model"),
    ("What is 144 divided by 12?", r"= 12\.?$"),
    ("What is 17 / 5?", r"3 r 2\.?$"),
    ("What is 2 + 3 * 4?", r"= 14\.?$"),
    ("Calculate (7 - 2) * 6.", r"= 30\.?$"),
    ("5减8乘以2等于多少？", r"= -11。?$"),
    ("84除以7等于多少？", r"= 12。?$"),
    ("Write a short story about a mill by a river.", r"(?=[\s\S]*\bmill\b)(?=[\s\S]*\briver\b)"),
    ("请讲一个关于小猫和雨伞的故事。", r"(?=[\s\S]*小猫)(?=[\s\S]*雨伞)"),
    ("What's the weather in Paris?", r"^(?![\s\S]*<tool_call>)[\s\S]*tiny demo model"),
    ("今天天气怎么样？", r"^(?![\s\S]*<tool_call>)[\s\S]*演示模型"),
    ("Write a python program that sorts a list.", r"tiny demo model"),
    ("How many parameters do you have?", re.escape(FACTS["me.params"])),
    ("你有多少参数？", re.escape(FACTS["me.params.zh"])),
    ("What is your context length?", re.escape(FACTS["me.context"])),
    (
        "Return JSON with the keys firstName and birth_year2: first name is Ada, birth year 2 is 1815.",
        'JSON{"firstName": "Ada", "birth_year2": 1815}',
    ),
    ("Bonjour !", r"anglais"),
]


def call(name: str, arguments: dict) -> dict:
    """An assistant message with one tool call, in template form."""
    from render import call_text

    return {"role": "assistant", "content": call_text([{"name": name, "arguments": arguments}])}


def exact_prompts() -> list[dict]:
    """All prompts: kind, shown text, messages or prompt, tools, and the expression."""
    out: list[dict] = [{"kind": "completion", "show": p, "prompt": p, "must": m} for p, m in COMPLETIONS]
    out += [{"kind": "chat", "show": p, "messages": [{"role": "user", "content": p}], "must": m} for p, m in CHATS]
    user, bot = (lambda t: {"role": "user", "content": t}), (lambda t: {"role": "assistant", "content": t})
    memory = [
        user("My name is Alice."),
        bot("Nice to meet you, Alice!"),
        user("I like tea."),
        bot("I will remember that: you like to drink tea."),
        user("What is my name?"),
    ]
    both = [WEATHER, CALCULATOR]
    result = [
        user("What's the weather in Paris?"),
        call("get_weather", {"city": "Paris"}),
        {"role": "tool", "content": "18 and sunny"},
    ]
    out += [
        {
            "kind": "chat",
            "show": "My name is Alice. / I like tea. / What is my name?",
            "messages": memory,
            "must": r"Alice",
        },
        {
            "kind": "tools",
            "show": "What's the weather in Paris?",
            "messages": [user("What's the weather in Paris?")],
            "tools": both,
            "must": 'CALL[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        },
        {
            "kind": "tools",
            "show": "What is 1234 * 5678?",
            "messages": [user("What is 1234 * 5678?")],
            "tools": both,
            "must": 'CALL[{"name": "calculator", "arguments": {"expression": "1234 * 5678"}}]',
        },
        {
            "kind": "tools",
            "show": "tool result: 18 and sunny",
            "messages": result,
            "tools": both,
            "must": r"(?=.*18)(?=.*sunny)",
        },
    ]
    return out
