"""What Python programs call, with what they give and get: LLM, AsyncLLM and the others of vLLM."""
