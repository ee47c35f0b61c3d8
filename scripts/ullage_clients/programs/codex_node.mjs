// OpenAI's Codex: a task without anybody at the terminal.

import { spawnSync } from "node:child_process";
import { mkdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { MODEL, expect, run } from "./checks.mjs";

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

await run({
  async task() {
    mkdirSync("task");
    const done = spawnSync(
      process.execPath,
      [
        program,
        "exec",
        "--json",
        "--skip-git-repo-check",
        "--sandbox=read-only",
        `--model=${MODEL}`,
        ...configuration,
        "Say hello.",
      ],
      { cwd: "task", encoding: "utf8", timeout: 300_000, input: "" },
    );
    console.error(done.stdout, done.stderr);
    const lines = done.stdout.split("\n").filter((line) => line.startsWith("{"));
    const events = lines.map((line) => JSON.parse(line));
    const failure = events.find((event) => ["turn.failed", "error"].includes(event.type));
    expect(done.status === 0 && !failure, failure ?? done.stderr.slice(-400));
    const kinds = events.map((event) => event.item?.type ?? event.type);
    expect(kinds.includes("agent_message"), kinds);
    return kinds.join(", ");
  },
});
