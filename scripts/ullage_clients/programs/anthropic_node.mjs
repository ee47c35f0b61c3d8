// Anthropic's SDK for Node: messages, tools, token counts and errors.

import Anthropic from "@anthropic-ai/sdk";
import { CITY, LONG, MODEL, PAINT, expect, isCity, isPaint, run, thrown } from "./checks.mjs";

const client = new Anthropic();
const TOOL = { name: "weather", description: "Weather of a city", input_schema: CITY };
const QUESTION = { role: "user", content: "What is the weather in Paris?" };
const ASK = { model: MODEL, messages: [QUESTION] };
const ENDS = ["end_turn", "max_tokens"];

await run({
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    expect(names.includes(MODEL), names);
    return (await client.models.retrieve(MODEL)).id;
  },

  async create() {
    const answer = await client.messages.create({ ...ASK, max_tokens: 8 });
    expect(answer.content[0].text && ENDS.includes(answer.stop_reason), answer);
    expect(answer.usage.input_tokens > 0 && answer.usage.output_tokens <= 8, answer.usage);
    return `${answer.stop_reason}, ${answer.usage.output_tokens} tokens`;
  },

  async stream() {
    const texts = [];
    const stream = client.messages.stream({ ...ASK, max_tokens: 8 });
    stream.on("text", (text) => texts.push(text));
    const answer = await stream.finalMessage();
    expect(texts.join("") === answer.content[0].text, answer);
    expect(ENDS.includes(answer.stop_reason), answer);
    return `${texts.length} pieces, ${answer.usage.output_tokens} tokens`;
  },

  async "forced tool"() {
    const answer = await client.messages.create({
      ...ASK,
      tools: [TOOL],
      tool_choice: { type: "tool", name: "weather" },
      max_tokens: 64,
    });
    expect(answer.stop_reason === "tool_use", answer);
    const [call] = answer.content;
    expect(call.type === "tool_use" && isCity(call.input), call);
    return JSON.stringify(call.input);
  },

  async "tool stream"() {
    const pieces = [];
    const stream = client.messages.stream({
      ...ASK,
      tools: [TOOL],
      tool_choice: { type: "any" },
      max_tokens: 64,
    });
    stream.on("inputJson", (piece) => pieces.push(piece));
    const answer = await stream.finalMessage();
    expect(answer.stop_reason === "tool_use", answer);
    expect(isCity(JSON.parse(pieces.join(""))) && isCity(answer.content.at(-1).input), answer);
    return `${pieces.length} pieces`;
  },

  async "auto tool"() {
    const answer = await client.messages.create({ ...ASK, tools: [TOOL], max_tokens: 32 });
    const kinds = answer.content.map((block) => block.type);
    expect(kinds.length && [...ENDS, "tool_use"].includes(answer.stop_reason), answer);
    expect(answer.stop_reason !== "tool_use" || kinds.includes("tool_use"), answer);
    return `${kinds.join()}: ${answer.stop_reason}`;
  },

  async "tool result"() {
    const call = { type: "tool_use", id: "toolu_1", name: "weather", input: { city: "Paris" } };
    const result = { type: "tool_result", tool_use_id: "toolu_1", content: "sunny" };
    const messages = [
      QUESTION,
      { role: "assistant", content: [call] },
      { role: "user", content: [result] },
    ];
    const answer = await client.messages.create({
      model: MODEL,
      messages,
      tools: [TOOL],
      tool_choice: { type: "none" },
      max_tokens: 8,
    });
    expect(answer.content[0].type === "text", answer);
    return answer.stop_reason;
  },

  async "JSON schema"() {
    const answer = await client.messages.create({
      ...ASK,
      output_config: { format: { type: "json_schema", schema: PAINT } },
      max_tokens: 64,
    });
    expect(isPaint(JSON.parse(answer.content[0].text)), answer);
    return answer.content[0].text;
  },

  async "token count"() {
    const count = await client.messages.countTokens({ ...ASK, tools: [TOOL] });
    const answer = await client.messages.create({ ...ASK, tools: [TOOL], max_tokens: 1 });
    const { input_tokens, cache_read_input_tokens } = answer.usage;
    expect(count.input_tokens === input_tokens + (cache_read_input_tokens ?? 0), answer.usage);
    return `${count.input_tokens} tokens`;
  },

  async "wrong model"() {
    const work = () => client.messages.create({ ...ASK, model: "absent", max_tokens: 1 });
    const error = await thrown(Anthropic.NotFoundError, work);
    expect(error.error.error.type === "not_found_error", error.error);
    return `NotFoundError, ${error.error.error.type}`;
  },

  async "long prompt"() {
    const messages = [{ role: "user", content: LONG }];
    const work = () => client.messages.create({ model: MODEL, messages, max_tokens: 1 });
    const error = await thrown(Anthropic.BadRequestError, work);
    expect(error.error.error.type === "invalid_request_error", error.error);
    return `BadRequestError, ${error.error.error.type}`;
  },
});
