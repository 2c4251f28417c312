"""The formats that model families write. Owns: one description each, and the names that other servers give them."""

from __future__ import annotations

from tokenmill.text.messages.describe import (
    Args,
    CallFormat,
    Calls,
    Head,
    Id,
    Lit,
    Loose,
    Name,
    Object,
    Pairs,
    Python,
    Skip,
    Thinking,
)

_NAMED = Object(name=("tool_name", "name"), args=("parameters", "arguments"))

HERMES = CallFormat("hermes", (Calls("<tool_call>\n", (Object(),), "\n</tool_call>"),))
LONGCAT = CallFormat("longcat", (Calls("<longcat_tool_call>\n", (Object(),), "\n</longcat_tool_call>"),))
_CODER = (Name((">",)), Pairs("\n<parameter=", ">\n", "\n</parameter>"), Lit("\n</function>", optional=True))
QWEN_CODER = CallFormat(
    "qwen3_coder",
    (
        Calls("<tool_call>\n", (Lit("<function="), *_CODER), "\n</tool_call>"),
        Calls("<function=", _CODER, "\n</tool_call>"),
    ),
    ends_thinking=True,
)
LLAMA_JSON = CallFormat(
    "llama3_json",
    (
        Calls("", (Object(args=("parameters", "arguments")),), many=True, between="; ", bare=True),
        Calls("<|python_tag|>", (Object(args=("parameters", "arguments")),), many=True, between="; "),
        Calls("{", (Object(args=("parameters", "arguments"), opened=True),), many=True, known=True),
    ),
    glue="",
)
LLAMA_PYTHON = CallFormat(
    "pythonic",
    (
        Calls("", (Python(),), array=True, many=True, between=", ", bare=True),
        Calls("<|python_start|>", (Python(),), "<|python_end|>", array=True, many=True, between=", "),
    ),
    glue="",
)
MISTRAL = CallFormat(
    "mistral",
    (
        Calls("[TOOL_CALLS]", (Name(("[CALL_ID]", "[ARGS]", "{"), keep=True), Id("[CALL_ID]", "[ARGS]"), Args())),
        Calls("[TOOL_CALLS]", (Object(),), array=True, many=True, between=", "),
    ),
    glue="",
    between="",
)
MISTRAL_ARRAY = CallFormat("mistral_v3", (MISTRAL.blocks[1], MISTRAL.blocks[0]), glue="")
DEEPSEEK_V3 = CallFormat(
    "deepseek_v3",
    (
        Calls(
            "<｜tool▁calls▁begin｜>",
            (
                Lit("<｜tool▁call▁begin｜>"),
                Skip("<｜tool▁sep｜>", "function"),
                Name(("\n",)),
                Lit("```json\n", optional=True),
                Args(),
                Lit("\n```", optional=True),
                Lit("<｜tool▁call▁end｜>", optional=True),
            ),
            "<｜tool▁calls▁end｜>",
            many=True,
        ),
    ),
    glue="",
)
DEEPSEEK_V31 = CallFormat(
    "deepseek_v31",
    (
        Calls(
            "<｜tool▁calls▁begin｜>",
            (
                Lit("<｜tool▁call▁begin｜>"),
                Name(("<｜tool▁sep｜>",)),
                Args(),
                Lit("<｜tool▁call▁end｜>", optional=True),
            ),
            "<｜tool▁calls▁end｜>",
            many=True,
            between="",
        ),
    ),
    glue="",
)


def _dsml(block: str) -> Calls:
    return Calls(
        f"<｜DSML｜{block}>\n",
        (
            Lit('<｜DSML｜invoke name="'),
            Name(('">',)),
            Pairs(
                '\n<｜DSML｜parameter name="',
                '" string="false">',
                "</｜DSML｜parameter>",
                text_mid='" string="true">',
            ),
            Lit("\n</｜DSML｜invoke>", optional=True),
        ),
        f"\n</｜DSML｜{block}>",
        many=True,
    )


DEEPSEEK_V32 = CallFormat("deepseek_v32", (_dsml("function_calls"), _dsml("tool_calls")), glue="\n\n")
DEEPSEEK_V4 = CallFormat("deepseek_v4", DEEPSEEK_V32.blocks[::-1], glue="\n\n")
KIMI = CallFormat(
    "kimi_k2",
    (
        Calls(
            "<|tool_calls_section_begin|>",
            (
                Lit("<|tool_call_begin|>"),
                Name(
                    ("<|tool_call_argument_begin|>",),
                    pattern=r"(?:functions\.)?(.+?)(?::\d+)?",
                    is_id=True,
                    written="functions.{name}:{index}",
                ),
                Args(),
                Lit("<|tool_call_end|>", optional=True),
            ),
            "<|tool_calls_section_end|>",
            many=True,
            between="",
        ),
    ),
    glue="",
    ends_thinking=True,
)
GLM = CallFormat(
    "glm45",
    (
        Calls(
            "<tool_call>",
            (
                Name(("\n", "<arg_key>", "</tool_call>"), keep=True),
                Pairs("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
            ),
            "\n</tool_call>",
        ),
    ),
)
MINIMAX_M1 = CallFormat(
    "minimax",
    (
        Calls("<tool_calls>\n", (Object(),), "\n</tool_calls>", many=True),
        Calls("<tool_calls>\n", (Object(),), "\n</tool_calls>", array=True, many=True, between=", "),
    ),
)
MINIMAX_M2 = CallFormat(
    "minimax_m2",
    (
        Calls(
            "<minimax:tool_call>\n",
            (
                Lit('<invoke name="'),
                Name(('">',)),
                Pairs('\n<parameter name="', '">', "</parameter>"),
                Lit("\n</invoke>", optional=True),
            ),
            "\n</minimax:tool_call>",
            many=True,
        ),
    ),
)
STEP3 = CallFormat(
    "step3",
    (
        Calls(
            "<｜tool_calls_begin｜>\n",
            (
                Lit("<｜tool_call_begin｜>"),
                Skip("<｜tool_sep｜>", "function"),
                Lit('<steptml:invoke name="'),
                Name(('">',)),
                Pairs('\n<steptml:parameter name="', '">', "</steptml:parameter>"),
                Lit("\n</steptml:invoke>", optional=True),
                Lit("<｜tool_call_end｜>", optional=True),
            ),
            "\n<｜tool_calls_end｜>",
            many=True,
        ),
    ),
    glue="",
)
_HARMONY_DROPS = (
    "<|start|>assistant",
    Head("<|channel|>final", "<|message|>"),
    Head("<|channel|>commentary", "<|message|>"),
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
_TO = Name(
    ("<|channel|>", "<|constrain|>", "<|message|>", " "),
    keep=True,
    pattern=r"(?:functions\.)?((?!(?:assistant|user)$).+)",
    written="functions.{name}",
)
_ROUTED = (_TO, Skip("<|message|>", " <|constrain|>json"), Args(anything=True))
HARMONY = CallFormat(
    "harmony",
    (
        Calls("<|channel|>commentary to=", _ROUTED, "<|call|>", ends=True),
        Calls("<|channel|>analysis to=", _ROUTED, "<|call|>"),
        Calls("<|start|>assistant to=", _ROUTED, "<|call|>"),
        Calls("", (Lit("to="), *_ROUTED), "<|call|>", bare=True, known=False),
    ),
    drop=_HARMONY_DROPS,
    glue="<|end|><|start|>assistant",
    between="<|start|>assistant",
)
GEMMA = CallFormat("gemma", (Calls("```tool_code\n", (Python(),), "\n```", many=True),))
GEMMA_FUNCTION = CallFormat(
    "functiongemma",
    (
        Calls(
            "<start_function_call>",
            (Lit("call:"), Name(("{",), keep=True), Loose("<escape>")),
            "<end_function_call>",
        ),
    ),
    glue="",
    between="",
)
GEMMA4 = CallFormat(
    "gemma4",
    (Calls("<|tool_call>", (Lit("call:"), Name(("{",), keep=True), Loose('<|"|>')), "<tool_call|>"),),
    glue="",
    between="",
)
PHI4 = CallFormat(
    "phi4_mini",
    (
        Calls("functools[", (Object(),), "]", many=True, between=", "),
        Calls("<|tool_call|>", (Object(),), "<|/tool_call|>", array=True, many=True, between=", "),
    ),
    glue="",
)
GRANITE = CallFormat(
    "granite",
    (
        Calls("<|tool_call|>", (Object(),), array=True, many=True, between=", "),
        Calls("<tool_call>", (Object(),), array=True, many=True, between=", "),
        Calls("<function_call>", (Object(),)),
        Calls("<tool_call>", (Object(),), "</tool_call>"),
    ),
    glue="",
)
COHERE = CallFormat(
    "cohere",
    (
        Calls("<|START_ACTION|>", (_NAMED,), "<|END_ACTION|>", array=True, many=True, between=", "),
        Calls("Action: ```json\n", (_NAMED,), "\n```", array=True, many=True, between=",\n"),
    ),
    drop=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    glue="",
)
INTERNLM = CallFormat(
    "internlm",
    (
        Calls(
            "<|action_start|>",
            (Lit("<|plugin|>\n"), Object(args=("parameters", "arguments"))),
            "<|action_end|>",
        ),
    ),
    glue="",
    between="",
)
FUNCTIONARY = CallFormat(
    "functionary", (Calls("<function=", (Name((">",)), Args()), "</function>"),), glue="", between=""
)
FUNCTIONARY_V32 = CallFormat(
    "functionary_v32",
    (Calls(">>>", (Name(("\n",)), Args()), bare=True),),
    drop=(">>>all\n",),
    start_drop=("all\n",),
    between="",
)
GIGACHAT = CallFormat(
    "gigachat3",
    (Calls("<|function_call|>", (Object(),)), Calls("function call<|role_sep|>\n", (Object(),))),
    drop=("<|message_sep|>",),
    glue="",
    between="",
)
_MARKED = (Object(),)
SEED = CallFormat(
    "seed_oss",
    (
        Calls(
            "<seed:tool_call>\n",
            (
                Lit("<function="),
                Name((">",)),
                Pairs("\n<parameter=", ">", "</parameter>"),
                Lit("\n</function>", optional=True),
            ),
            "\n</seed:tool_call>",
        ),
    ),
)
LFM2 = CallFormat(
    "lfm2",
    (
        Calls("<|tool_call_start|>", (Python(),), "<|tool_call_end|>", array=True, many=True, between=", "),
        Calls("<|tool_call_start|>", (Object(),), "<|tool_call_end|>", array=True, many=True, between=", "),
        Calls("<|tool_call_start|>", (Object(),), "<|tool_call_end|>", many=True),
        Calls("<|tool_call_start|>", (Python(),), "<|tool_call_end|>", many=True),
    ),
    glue="",
)
OLMO3 = CallFormat("olmo3", (Calls("<function_calls>\n", (Python(),), "\n</function_calls>", many=True),))
APERTUS = CallFormat(
    "apertus",
    (
        Calls(
            "<|tools_prefix|>",
            (Lit('{"'), Name(('"',)), Lit(":"), Args(), Lit("}")),
            "<|tools_suffix|>",
            array=True,
            many=True,
            between=", ",
        ),
    ),
    glue="",
)
NEMOTRON = CallFormat(
    "nemotron", (Calls("<TOOLCALL>", _MARKED, "</TOOLCALL>", array=True, many=True, between=", "),), glue=""
)
TOOL_CALLS = CallFormat(
    "tool_calls",
    (
        Calls("<tool_calls>", _MARKED, "</tool_calls>", array=True, many=True, between=", "),
        MINIMAX_M1.blocks[0],
    ),
)
PLAIN = CallFormat("plain", (Calls("", (Object(),), array=True, many=True, between=", ", bare=True),), glue="")
"""A JSON array of calls. Models whose own format has no grammar are held to it."""

XLAM = CallFormat(
    "xlam",
    (
        PLAIN.blocks[0],
        Calls("```json\n", _MARKED, "\n```", array=True, many=True, between=", "),
        MISTRAL.blocks[1],
        Calls("<tool_call>", _MARKED, "</tool_call>", array=True, many=True, between=", "),
        Calls("<tool_call>", _MARKED, "</tool_call>"),
    ),
    glue="",
)

CALL_FORMATS: dict[str, CallFormat] = {
    f.name: f
    for f in (
        HERMES,
        LONGCAT,
        QWEN_CODER,
        LLAMA_JSON,
        LLAMA_PYTHON,
        MISTRAL,
        MISTRAL_ARRAY,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        DEEPSEEK_V32,
        DEEPSEEK_V4,
        KIMI,
        GLM,
        MINIMAX_M1,
        MINIMAX_M2,
        HARMONY,
        GEMMA,
        GEMMA_FUNCTION,
        GEMMA4,
        PHI4,
        GRANITE,
        COHERE,
        INTERNLM,
        FUNCTIONARY,
        FUNCTIONARY_V32,
        GIGACHAT,
        SEED,
        LFM2,
        OLMO3,
        APERTUS,
        NEMOTRON,
        TOOL_CALLS,
        STEP3,
        XLAM,
    )
}

THINK = Thinking("<think>\n", "\n</think>")
THINKING: dict[str, Thinking] = {
    "think": THINK,
    "think_tokens": Thinking("<think>", "</think>", lead="", calls_end=True),
    "mistral": Thinking("[THINK]", "[/THINK]", lead=""),
    "granite": Thinking("Here is my thought process:", "Here is my response:", lead=""),
    "cohere": Thinking("<|START_THINKING|>", "<|END_THINKING|>", lead=""),
    "harmony": Thinking(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        lead="<|start|>assistant",
        answer="<|channel|>final<|message|>",
        drop=_HARMONY_DROPS,
        anywhere=True,
        calls_end=True,
    ),
    "apriel": Thinking(
        "Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n", lead="", drop=("\n[END FINAL RESPONSE]",)
    ),
    "seed_oss": Thinking("<seed:think>", "</seed:think>", lead=""),
    "gemma4": Thinking("<|channel>thought\n", "<channel|>", lead=""),
    "apertus": Thinking("<|inner_prefix|>", "<|inner_suffix|>", lead=""),
    "ernie45": Thinking("<think>\n", "\n</think>", drop=("<response>\n", "\n</response>")),
    "hunyuan_a13b": Thinking("<think>\n", "\n</think>", lead="\n", drop=("<answer>\n", "\n</answer>")),
}

CALL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "mimo": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "deepseekv3": "deepseek_v3",
    "deepseek_r1": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm47": "glm45",
    "glm": "glm45",
    "minimax-m2": "minimax_m2",
    "openai": "harmony",
    "gpt-oss": "harmony",
    "gpt_oss": "harmony",
    "phi4_mini_json": "phi4_mini",
    "granite-20b-fc": "granite",
    "granite4": "hermes",
    "command_r": "cohere",
    "internlm2": "internlm",
    "interns1": "internlm",
    "functionary_v3": "functionary",
    "ernie45": "hermes",
    "hunyuan_a13b": "tool_calls",
    "hunyuan": "tool_calls",
    "jamba": "tool_calls",
    "nemotron_v2": "nemotron",
    "seed": "seed_oss",
}
THINKING_ALIASES = {
    "deepseek_r1": "think",
    "deepseek-r1": "think",
    "deepseek_v3": "think",
    "deepseek_v4": "think",
    "step3p5": "think",
    "mimo": "think",
    "holo2": "think",
    "nemotron_v3": "think",
    "qwen3": "think",
    "glm45": "think",
    "minimax_m2": "think",
    "step3": "think",
    "olmo3": "think",
    "kimi_k2": "think_tokens",
    "kimi": "think_tokens",
    "openai_gptoss": "harmony",
    "gpt-oss": "harmony",
    "gpt_oss": "harmony",
    "magistral": "mistral",
    "command_a": "cohere",
}
