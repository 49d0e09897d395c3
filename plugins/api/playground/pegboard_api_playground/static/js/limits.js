// The sampling settings and what they may be. An empty field leaves the choice to the server.

export const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, hint: "0 = always the most likely token" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, hint: "Keep the most likely tokens up to this probability" },
  { name: "top_k", label: "Top k", min: 0, step: 1, hint: "Keep this many tokens; 0 = all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "Drop tokens below this part of the best one's probability" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, hint: "Longest answer" },
  { name: "seed", label: "Seed", min: 0, step: 1, hint: "The same seed gives the same answer" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, hint: "Against tokens that were said" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: "Against tokens that were said often" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 2, step: 0.01, hint: "Above 1 = fewer repetitions, also of the prompt" },
];

export const DEFAULTS = {
  model: "",
  system: "",
  stop: "",
  tools: "",
  tool_choice: "auto",
  schema: "",
  logprobs: false,
  ...Object.fromEntries(FIELDS.map((field) => [field.name, null])),
};

/** The fields for one model, as /v1/models lists it: an answer is at most as long as the model. */
export function fieldsFor(model) {
  return FIELDS.map((field) =>
    field.name === "max_tokens" && model?.max_model_len ? { ...field, max: model.max_model_len } : field,
  );
}

/** Read a number that the user typed. Returns null for an empty text. Throws if it is out of range. */
export function readNumber(text, field) {
  if (text.trim() === "") return null;
  const value = Number(text);
  const { label, min, max, step } = field;
  if (!Number.isFinite(value)) throw new Error(`${label} must be a number`);
  if (step === 1 && !Number.isInteger(value)) throw new Error(`${label} must be a whole number`);
  if (value < min) throw new Error(`${label} must be at least ${min}`);
  if (max !== undefined && value > max) throw new Error(`${label} must be at most ${max}`);
  return value;
}
