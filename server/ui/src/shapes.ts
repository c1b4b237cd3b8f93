// Shapes of values that come from outside: each is a function that returns its value with the known fields alone, or
// throws an error that names the place of what is wrong.

export type Shape<T> = (value: unknown, at: string) => T;
type Fields<T> = {[Name in keyof T]-?: Shape<T[Name]>};

const fail: (at: string, needs: string) => never = (at, needs) => { throw new Error(`${at} must be ${needs}`); };
const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);

export const text: Shape<string> = (value, at) => (typeof value === "string" ? value : fail(at, "a string"));
export const number: Shape<number> = (value, at) => (typeof value === "number" && Number.isFinite(value) ? value : fail(at, "a number"));
export const flag: Shape<boolean> = (value, at) => (typeof value === "boolean" ? value : fail(at, "true or false"));
export const object: Shape<Record<string, unknown>> = (value, at) => (isObject(value) ? value : fail(at, "an object"));

export const oneOf = <T extends string>(...all: T[]): Shape<T> => (value, at) => all.find(one => one === value) ?? fail(at, all.map(one => `“${one}”`).join(" or "));

export const matching = (pattern: RegExp, needs: string): Shape<string> => (value, at) =>
  (typeof value === "string" && pattern.test(value) ? value : fail(at, needs));

export const list = <T>(of: Shape<T>, needs = "an array"): Shape<T[]> => (value, at) =>
  (Array.isArray(value) ? value.map((one, i) => of(one, `${at}[${i}]`)) : fail(at, needs));

export const record = <T>(of: Shape<T>): Shape<Record<string, T>> => (value, at) =>
  Object.fromEntries(Object.entries(object(value, at)).map(([key, one]) => [key, of(one, `${at}.${key}`)]));

/** A field that may be absent or null. */
export const optional = <T>(of: Shape<T>): Shape<T | undefined> => (value, at) => (value === undefined || value === null ? undefined : of(value, at));

export const nullable = <T>(of: Shape<T>): Shape<T | null> => (value, at) => (value === null ? null : of(value, at));

/** A field with a value in its place where it is absent or null. */
export const or = <T>(of: Shape<T>, absent: T): Shape<T> => (value, at) => optional(of)(value, at) ?? absent;

/** An object of these fields; others are left out. */
export const fields = <T extends object>(of: Fields<T>): Shape<T> => (value, at) => {
  const from = object(value, at), taken: Record<string, unknown> = {};
  for (const name of Object.keys(of) as (keyof T & string)[]) {
    const one = of[name](Object.hasOwn(from, name) ? from[name] : undefined, `${at}.${name}`);
    if (one !== undefined) taken[name] = one;
  }
  return taken as T;
};
