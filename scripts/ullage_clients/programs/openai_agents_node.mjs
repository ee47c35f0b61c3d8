// OpenAI's Agents SDK for Node: tasks by responses.

import { Agent, run as work, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { LONG, MODEL, expect, run, thrown } from "./checks.mjs";

// Traces would go to OpenAI.
setTracingDisabled(true);

const GREETING = "Hello";
const cities = [];
const weather = tool({
  name: "weather",
  description: "Weather of a city",
  parameters: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => {
    cities.push(city);
    return "sunny";
  },
});

// The likeliest answer to a greeting is a greeting, which ends.
function agent(options = {}, settings = {}) {
  return new Agent({
    name: "helper",
    instructions: "Be brief.",
    model: MODEL,
    modelSettings: { maxTokens: 200, temperature: 0, ...settings },
    ...options,
  });
}

await run({
  async task() {
    const result = await work(agent(), GREETING);
    expect(result.finalOutput, "no text");
    return `${result.state.usage.outputTokens} tokens`;
  },

  async "task with a tool"() {
    const helper = agent(
      { tools: [weather], toolUseBehavior: "stop_on_first_tool" },
      { toolChoice: "required" },
    );
    const result = await work(helper, "What is the weather in Paris?");
    expect(cities.length && result.finalOutput === "sunny", result.finalOutput);

    const turns = [...result.history, { role: "user", content: GREETING }];
    const next = await work(agent(), turns);
    expect(next.finalOutput, "no text after the result");
    return `${cities[0]}, then ${next.state.usage.outputTokens} tokens`;
  },

  async stream() {
    const result = await work(agent(), GREETING, { stream: true });
    const kinds = [];
    for await (const event of result) kinds.push(event.type);
    await result.completed;
    expect(kinds.includes("raw_model_stream_event") && result.finalOutput, kinds);
    return `${kinds.length} events`;
  },

  async "wrong model"() {
    const helper = agent({ model: "absent" });
    const error = await thrown(OpenAI.NotFoundError, () => work(helper, GREETING));
    expect(error.code === "model_not_found", error.code);
    return `NotFoundError, ${error.code}`;
  },

  async "long prompt"() {
    const error = await thrown(OpenAI.BadRequestError, () => work(agent(), LONG));
    expect(error.code === "context_length_exceeded", `${error.code}: ${error.message}`);
    return `BadRequestError, ${error.code}`;
  },
});
