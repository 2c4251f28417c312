"""Several adapters in one batch: `LLM.chat` and the engine by hand, as vLLM's multi-LoRA example has it."""

from tokenmill import LLM, LoRARequest, SamplingParams

PIRATE, SQL = LoRARequest("pirate", 1, "demo:pirate"), LoRARequest("sql", 2, "demo:sql")
FACT = "What is the capital of France?"
TABLE = "Table users(name, age, city, email). Show the name of all users."


def main() -> None:
    """Ask with each adapter, and without one."""
    with LLM(model="demo", enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        asked = [(FACT, None), (FACT, PIRATE), (TABLE, SQL)]
        talks = [[{"role": "user", "content": text}] for text, _ in asked]
        params = SamplingParams(temperature=0, max_tokens=32)
        for (text, adapter), output in zip(asked, llm.chat(talks, params, False, [a for _, a in asked]), strict=True):
            print(f"{adapter.lora_name if adapter else 'base'}: {text} -> {output.outputs[0].text}")

        engine = llm.llm_engine
        for number, adapter in enumerate((None, PIRATE, SQL)):
            engine.add_request(str(number), FACT, SamplingParams(temperature=0, max_tokens=4), lora_request=adapter)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    print(f"request {output.request_id}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
