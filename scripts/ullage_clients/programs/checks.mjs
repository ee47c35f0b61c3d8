// Runs the checks of a program, and prints a line of JSON with the result of each.

export const MODEL = process.env.SERVICE_MODEL;
export const CONTEXT = Number(process.env.SERVICE_CONTEXT);
export const URL = process.env.SERVICE_URL;

// Schema of the arguments of a tool. A list of values ends at any model's size.
export const CITY = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
export const PAINT = {
  type: "object",
  properties: {
    color: { type: "string", enum: ["red", "blue"] },
    coats: { type: "integer", enum: [1, 2] },
  },
  required: ["color", "coats"],
  additionalProperties: false,
};
// A prompt beyond the context.
export const LONG = "word ".repeat(2 * CONTEXT);

// Runs an object of checks by name. Each returns what it saw, and throws if that is wrong.
export async function run(checks) {
  for (const [check, judge] of Object.entries(checks)) {
    let passed = true;
    let seen;
    try {
      seen = await judge();
    } catch (error) {
      console.error(error);
      seen = `${error?.constructor?.name}: ${error?.message}`;
      passed = false;
    }
    console.log(JSON.stringify({ check, passed, seen: String(seen) }));
  }
}

export function expect(condition, seen) {
  if (!condition) throw new Error(typeof seen === "string" ? seen : JSON.stringify(seen));
}

// Returns the error of this class that a function throws.
export async function thrown(kind, work) {
  let answer;
  try {
    answer = await work();
  } catch (error) {
    if (error instanceof kind) return error;
    throw error;
  }
  throw new Error(`no ${kind.name}, but ${JSON.stringify(answer)}`);
}

export function isCity(value) {
  return Object.keys(value).join() === "city" && CITY.properties.city.enum.includes(value.city);
}

export function isPaint(value) {
  const { color, coats } = PAINT.properties;
  return (
    Object.keys(value).sort().join() === "coats,color" &&
    color.enum.includes(value.color) &&
    coats.enum.includes(value.coats)
  );
}
