"""Google: tool calls of FunctionGemma."""
