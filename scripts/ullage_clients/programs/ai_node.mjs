// The AI SDK with the provider for servers that are compatible with OpenAI's API.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embed, generateText, jsonSchema, streamText, tool } from "ai";
import { CITY, LONG, MODEL, PAINT, expect, isCity, isPaint, run, thrown } from "./checks.mjs";

const provider = createOpenAICompatible({
  name: "service",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(MODEL);
const prompt = "What is the weather in Paris?";
const tools = {
  weather: tool({ description: "Weather of a city", inputSchema: jsonSchema(CITY) }),
};

await run({
  async create() {
    const answer = await generateText({ model, prompt, maxOutputTokens: 8 });
    expect(answer.text && answer.usage.outputTokens >= 1, answer.usage);
    return `${answer.finishReason}, ${answer.usage.outputTokens} tokens`;
  },

  async stream() {
    const answer = streamText({ model, prompt, maxOutputTokens: 8 });
    const texts = [];
    for await (const text of answer.textStream) texts.push(text);
    const usage = await answer.usage;
    expect(texts.length && usage.outputTokens >= 1, usage);
    return `${texts.length} pieces, ${usage.outputTokens} tokens`;
  },

  async "forced tool"() {
    const answer = await generateText({
      model,
      prompt,
      tools,
      toolChoice: { type: "tool", toolName: "weather" },
      maxOutputTokens: 64,
    });
    const [call] = answer.toolCalls;
    expect(call?.toolName === "weather" && isCity(call.input), answer.toolCalls);
    return JSON.stringify(call.input);
  },

  async "auto tool"() {
    const answer = await generateText({ model, prompt, tools, maxOutputTokens: 32 });
    expect(answer.text || answer.toolCalls.length, answer.finishReason);
    return answer.finishReason;
  },

  async "JSON schema"() {
    const { output } = await generateText({
      model,
      prompt,
      output: Output.object({ schema: jsonSchema(PAINT) }),
      maxOutputTokens: 64,
    });
    expect(isPaint(output), output);
    return JSON.stringify(output);
  },

  async "wrong model"() {
    const work = () => generateText({ model: provider("absent"), prompt });
    const error = await thrown(APICallError, work);
    expect(error.statusCode === 404, error.statusCode);
    return `APICallError, ${error.statusCode}`;
  },

  async "long prompt"() {
    const error = await thrown(APICallError, () => generateText({ model, prompt: LONG }));
    expect(error.statusCode === 400 && !error.isRetryable, error.statusCode);
    return `APICallError, ${error.statusCode}`;
  },

  async embeddings() {
    const work = () => embed({ model: provider.embeddingModel(MODEL), value: "Hello" });
    const error = await thrown(APICallError, work);
    expect(error.statusCode === 400, error.statusCode);
    return `APICallError, ${error.statusCode}`;
  },
});
