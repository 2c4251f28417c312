"""Answer conversations: one, several, and one with a template of its own."""

from __future__ import annotations

import sys

from tokenmill import LLM, RequestOutput, SamplingParams

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I help you today?"},
    {"role": "user", "content": "What is the capital of Italy?"},
]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def main(model: str = "demo") -> list[RequestOutput]:
    """Chat, and print the answers."""
    llm = LLM(model=model)
    params = llm.get_default_sampling_params()
    params.max_tokens = 16
    outputs = llm.chat(CONVERSATION, params, use_tqdm=False)
    outputs += llm.chat([CONVERSATION for _ in range(3)], SamplingParams(max_tokens=16), use_tqdm=True)
    outputs += llm.chat(CONVERSATION, params, chat_template=TEMPLATE, use_tqdm=False)
    for output in outputs:
        print(f"{output.outputs[0].text!r}")
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
