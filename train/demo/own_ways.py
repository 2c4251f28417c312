"""Ways to ask the model for its own figures. Owns: clauses and names of each, put together with openings."""

from __future__ import annotations

import random

CLAUSES: dict[str, list[str]] = {
    "identity": [
        "who you are",
        "what your name is",
        "what you are called",
        "which model you are",
        "what kind of model you are",
    ],
    "maker": ["who made you", "who built you", "who trained you", "where you come from", "who your makers are"],
    "ability": ["what you can do", "what you are able to do", "what you are good at", "how you can help me"],
    "size": [
        "how many parameters you have",
        "how large you are",
        "what size you have",
        "how many weights there are in you",
    ],
    "language": ["which languages you speak", "what languages you can speak", "whether you speak Chinese"],
    "context": ["how long your context is", "how many tokens you can read", "how much text fits into your context"],
    "layers": [
        "how many layers you have",
        "what your architecture is",
        "how many attention heads you have",
        "how deep you are",
    ],
    "vocab": ["how large your vocabulary is", "how many tokens you know", "how many entries your vocabulary has"],
    "bytes": [
        "how many megabytes you are",
        "how large your file is",
        "how much memory you need",
        "how much space you take",
    ],
    "eyes": ["whether you can see images", "if you can look at pictures", "whether you understand photos"],
    "net": [
        "whether you are online",
        "if you can use the internet",
        "whether you have internet access",
        "if you can search the web",
    ],
}
NAMES: dict[str, list[str]] = {
    "identity": ["your name", "your identity"],
    "maker": ["your maker", "your creator", "the name of your developer"],
    "ability": ["your abilities", "your skills", "your talents", "the list of your skills"],
    "size": [
        "your number of parameters",
        "your parameter count",
        "your size in parameters",
        "the count of your weights",
    ],
    "language": ["your languages", "the languages you speak"],
    "context": ["your context size", "your context window", "the length of your context", "your maximum context"],
    "layers": ["your number of layers", "your layer count", "your architecture", "your network structure"],
    "vocab": ["your vocabulary size", "the size of your vocabulary"],
    "bytes": ["your file size", "your size in megabytes", "the size of your weights on disk"],
}
YES: dict[str, list[str]] = {
    "eyes": [
        "see images",
        "see pictures",
        "look at photos",
        "read an image",
        "view a picture",
        "see what I see",
        "watch videos",
    ],
    "net": ["go online", "search the web", "use the internet", "open a website", "google things", "reach the internet"],
}
PARTS: dict[str, list[str]] = {
    "size": ["parameters", "weights", "trainable parameters", "million parameters", "numbers", "model parameters"],
    "layers": ["layers", "blocks", "transformer blocks", "decoder layers", "attention heads", "key-value heads"],
    "context": ["tokens of context", "input tokens", "tokens in one prompt", "context tokens"],
    "vocab": ["tokens in the vocabulary", "vocabulary entries", "different tokens", "tokenizer entries"],
    "bytes": ["megabytes", "MB", "megabytes on disk", "MB of weights", "MB of memory"],
}
"""What can be counted in the model, by figure."""
OWNED_BY = ["do you have", "are there in you", "are you made of", "do you consist of", "does your network have"]
OWNED_BY += ["make you up", "are inside you", "does your model have", "has your network", "do you contain", "have you"]
OWNED_BY += ["do you come with", "were you given", "are you built from", "does this model have", "do you use"]
LOOKS: dict[str, list[str]] = {
    "size": ["big", "large", "huge", "tiny", "little", "giant", "enormous", "compact", "mini", "massive", "minute"],
    "layers": ["deep", "shallow", "wide", "narrow"],
}
"""Adjectives that ask for a figure."""
LOOKED = [
    "Are you {l}?",
    "are you {l}",
    "Are you a {l} model?",
    "Are you {l} or not?",
    "How {l} are you?",
    "Are you very {l}?",
]
LOOKED += [
    "So you are {l}?",
    "Would you call yourself {l}?",
    "Is your model {l}?",
    "You are {l}, right?",
    "Are you rather {l}?",
]
LOOKED += ["Are you {l} or small?", "Are you a {l} or a small one?", "Is this model {l}?", "How {l} is your network?"]
ONLINE = ["online", "on the internet", "linked to the internet", "connected to the internet", "on the web"]
ASK_CLAUSE = [
    "{o}tell me {c}.",
    "Do you know {c}?",
    "Can you tell me {c}?",
    "I want to know {c}.",
    "Could you say {c}?",
]
ASK_CLAUSE += [
    "I would like to know {c}.",
    "Please say {c}.",
    "Explain {c}.",
    "I wonder {c}.",
    "May I ask {c}?",
    "{c}?",
]
ASK_NAME = [
    "What is {n}?",
    "what's {n}",
    "Tell me {n}.",
    "Please give me {n}.",
    "{n}?",
    "Describe {n}.",
    "I want to know {n}.",
]
ASK_NAME += [
    "What can you say about {n}?",
    "Do you know {n}?",
    "State {n}.",
    "Can you tell me {n}?",
    "Let me know {n}.",
]
OPEN = ["", "", "Please ", "Now ", "Just "]
NAMES_ZH: dict[str, list[str]] = {
    "identity_zh": ["名字", "身份", "自我介绍"],
    "maker_zh": ["开发者", "作者", "制作者", "来历"],
    "ability_zh": ["本领", "功能", "能力", "特长", "用处"],
    "size_zh": ["参数量", "参数数量", "参数个数", "规模"],
    "language_zh": ["语言", "语言能力"],
    "context_zh": ["上下文长度", "上下文窗口", "最大上下文"],
    "layers_zh": ["层数", "架构", "网络结构", "模型结构", "注意力头数"],
    "vocab_zh": ["词表大小", "词汇量", "词表"],
    "bytes_zh": ["文件大小", "权重大小", "体积"],
}
ASK_ZH = [
    "你的[n]是什么？",
    "介绍一下你的[n]。",
    "说说你的[n]。",
    "告诉我你的[n]。",
    "你的[n]怎么样？",
    "我想知道你的[n]。",
]
ASK_ZH += [
    "谈谈你的[n]。",
    "能说说你的[n]吗？",
    "请问你的[n]是什么？",
    "讲讲你的[n]吧。",
    "你的[n]呢？",
    "想了解你的[n]。",
]
YES_ZH = {
    "eyes_zh": ["看图片", "看照片", "识别图像", "看见东西", "看视频"],
    "net_zh": ["上网", "联网", "搜索网页", "浏览网页", "用搜索引擎"],
}
ASK_YES_ZH = [
    "你能[v]吗？",
    "你会[v]吗？",
    "你可以[v]吗？",
    "请问你能不能[v]？",
    "你能不能[v]？",
    "你会不会[v]？",
    "你有没有[v]的能力？",
]


def _counted(rng: random.Random, part: str) -> str:
    """A question for a number of something in the model."""
    pick = rng.random()
    if pick < 0.6:
        text = f"How many {part} {rng.choice(OWNED_BY)}?"
    elif pick < 0.75:
        text = f"{rng.choice(['Number of', 'Count of', 'The number of', 'How many'])} {part}?"
    else:
        lead = rng.choice(
            ["Tell me how many", "Do you know how many", "I want to know how many", "Can you say how many"]
        )
        text = f"{lead} {part} you {rng.choice(['have', 'use', 'consist of', 'contain', 'are made of'])}."
    return text if rng.random() < 0.75 else text.lower().rstrip("?.")


def composed_ask(rng: random.Random, intent: str) -> str:
    """A question on a figure or ability of the model, or nothing where no parts are written for it."""
    if intent in NAMES_ZH:
        return rng.choice(ASK_ZH).replace("[n]", rng.choice(NAMES_ZH[intent]))
    if intent in YES_ZH:
        return rng.choice(ASK_YES_ZH).replace("[v]", rng.choice(YES_ZH[intent]))
    if intent not in CLAUSES:
        return ""
    if intent in LOOKS and rng.random() < 0.25:
        text = rng.choice(LOOKED if intent == "size" else LOOKED[:6] + LOOKED[8:9])
        return text.replace("{l}", rng.choice(LOOKS[intent])).replace(" a enor", " an enor")
    if intent in PARTS and rng.random() < 0.4:
        return _counted(rng, rng.choice(PARTS[intent]))
    pick = rng.random()
    if intent in YES and pick < 0.6:
        if intent == "net" and rng.random() < 0.3:
            return f"{rng.choice(['Are you', 'Are you really', 'are you', 'Are you currently'])} {rng.choice(ONLINE)}?"
        start = rng.choice(["Can you", "can you", "Could you", "Are you able to", "Is it true that you can"])
        return f"{start} {rng.choice(YES[intent])}?"
    if intent in NAMES and pick < 0.5:
        text = rng.choice(ASK_NAME).replace("{n}", rng.choice(NAMES[intent]))
    else:
        text = rng.choice(ASK_CLAUSE).replace("{o}", rng.choice(OPEN)).replace("{c}", rng.choice(CLAUSES[intent]))
    return text[0].upper() + text[1:] if rng.random() < 0.8 else text
