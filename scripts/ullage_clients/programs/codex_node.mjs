// OpenAI's Codex: a task without anybody at the terminal.

import { spawnSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { CONTEXT, LONG, MODEL, expect, run } from "./checks.mjs";

const home = dirname(fileURLToPath(import.meta.url));
const program = join(home, "node_modules", "@openai", "codex", "bin", "codex.js");
const provider = {
  name: "service",
  base_url: process.env.OPENAI_BASE_URL,
  env_key: "OPENAI_API_KEY",
  wire_api: "responses",
};
const configuration = Object.entries(provider)
  .flatMap(([key, value]) => ["-c", `model_providers.service.${key}="${value}"`])
  .concat(["-c", 'model_provider="service"', "-c", 'web_search="disabled"']);

// Runs `codex exec`, and returns its exit status and its events.
function exec(prompt, ...settings) {
  const options = ["--json", "--skip-git-repo-check", "--sandbox=read-only", `--model=${MODEL}`];
  const done = spawnSync(
    process.execPath,
    [program, "exec", ...options, ...configuration, ...settings, "-"],
    { encoding: "utf8", timeout: 240_000, input: prompt },
  );
  console.error(done.stdout, done.stderr);
  const lines = done.stdout.split("\n").filter((line) => line.startsWith("{"));
  return { status: done.status, events: lines.map((line) => JSON.parse(line)) };
}

await run({
  async "long prompt"() {
    const { status, events } = exec(LONG);
    const failure = events.find((event) => event.type === "turn.failed");
    expect(status !== 0 && failure?.error.message.includes("context window"), events);
    return failure.error.message;
  },

  async task() {
    writeFileSync("instructions.md", "Be brief.");
    const { status, events } = exec(
      "Hello",
      ...["-c", `model_instructions_file="${resolve("instructions.md")}"`],
      ...["-c", `model_context_window=${CONTEXT}`],
      ...["-c", "include_permissions_instructions=false"],
      ...["-c", "include_environment_context=false"],
      ...["-c", "include_apps_instructions=false"],
    );
    const kinds = events.map((event) => event.item?.type ?? event.type);
    expect(kinds.includes("agent_message"), events);
    if (status === 0) return "a message";
    // A small model does not always stop. Codex takes an answer for an error that a limit cuts.
    const failure = events.find((event) => event.type === "turn.failed");
    expect(failure?.error.message.includes("max_output_tokens"), failure);
    return "a message that a limit cut";
  },
});
