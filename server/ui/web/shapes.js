// Shapes of values that come from outside: each is a function that returns its value with the known fields alone, or
// throws an error that names the place of what is wrong.
const fail = (at, needs) => { throw new Error(`${at} must be ${needs}`); };
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
export const text = (value, at) => (typeof value === "string" ? value : fail(at, "a string"));
export const number = (value, at) => (typeof value === "number" && Number.isFinite(value) ? value : fail(at, "a number"));
export const flag = (value, at) => (typeof value === "boolean" ? value : fail(at, "true or false"));
export const object = (value, at) => (isObject(value) ? value : fail(at, "an object"));
export const oneOf = (...all) => (value, at) => all.find(one => one === value) ?? fail(at, all.map(one => `“${one}”`).join(" or "));
export const matching = (pattern, needs) => (value, at) => (typeof value === "string" && pattern.test(value) ? value : fail(at, needs));
export const list = (of, needs = "an array") => (value, at) => (Array.isArray(value) ? value.map((one, i) => of(one, `${at}[${i}]`)) : fail(at, needs));
export const record = (of) => (value, at) => Object.fromEntries(Object.entries(object(value, at)).map(([key, one]) => [key, of(one, `${at}.${key}`)]));
/** A field that may be absent or null. */
export const optional = (of) => (value, at) => (value === undefined || value === null ? undefined : of(value, at));
export const nullable = (of) => (value, at) => (value === null ? null : of(value, at));
/** A field with a value in its place where it is absent or null. */
export const or = (of, absent) => (value, at) => optional(of)(value, at) ?? absent;
/** An object of these fields; others are left out. */
export const fields = (of) => (value, at) => {
    const from = object(value, at), taken = {};
    for (const name of Object.keys(of)) {
        const one = of[name](Object.hasOwn(from, name) ? from[name] : undefined, `${at}.${name}`);
        if (one !== undefined)
            taken[name] = one;
    }
    return taken;
};
