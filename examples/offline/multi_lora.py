"""Several adapters in one batch: offline, and with the engine by hand, as vLLM's multi-LoRA example has it."""

from tokenmill import LLM, LoRARequest, SamplingParams

PIRATE, SQL = LoRARequest("pirate", 1, "demo:pirate"), LoRARequest("sql", 2, "demo:sql")
FACT = "What is the capital of France?"
TABLE = "Table users(name, age, city, email). Show the name of all users."


def main(model: str = "demo"):
    llm = LLM(model=model, enable_lora=True, max_loras=2, max_lora_rank=8)
    adapters = [None, PIRATE, SQL]
    talks = [[{"role": "user", "content": text}] for text in (FACT, FACT, TABLE)]
    params = SamplingParams(temperature=0, max_tokens=32)
    outputs = llm.chat(talks, params, use_tqdm=False, lora_request=adapters)
    for adapter, output in zip(adapters, outputs, strict=True):
        print(adapter.lora_name if adapter else "base", "->", output.outputs[0].text)

    engine = llm.llm_engine
    for number, adapter in enumerate(adapters):
        engine.add_request(str(number), FACT, SamplingParams(temperature=0, max_tokens=4), lora_request=adapter)
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    return outputs


if __name__ == "__main__":
    main()
