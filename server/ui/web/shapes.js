// Shapes of values that come from outside: each is a function that returns its value with the known fields alone, or
// throws an error that names the place of what is wrong.

/** @import {Fields, Shape} from "../src/types.js" */

const /** @type {(at: string, needs: string) => never} */ fail = (at, needs) => { throw new Error(`${at} must be ${needs}`); };
/** @returns {value is Record<string, unknown>} */
const isObject = (/** @type {unknown} */ value) => typeof value === "object" && value !== null && !Array.isArray(value);

export const /** @type {Shape<string>} */ text = (value, at) => (typeof value === "string" ? value : fail(at, "a string"));
export const /** @type {Shape<number>} */ number = (value, at) => (typeof value === "number" && Number.isFinite(value) ? value : fail(at, "a number"));
export const /** @type {Shape<boolean>} */ flag = (value, at) => (typeof value === "boolean" ? value : fail(at, "true or false"));
export const /** @type {Shape<Record<string, unknown>>} */ object = (value, at) => (isObject(value) ? value : fail(at, "an object"));

/**
 * @template {string} T
 * @param {...T} all
 * @returns {Shape<T>}
 */
export const oneOf = (...all) => (value, at) => all.find(one => one === value) ?? fail(at, all.map(one => `“${one}”`).join(" or "));

/** @returns {Shape<string>} */
export const matching = (/** @type {RegExp} */ pattern, /** @type {string} */ needs) => (value, at) =>
  (typeof value === "string" && pattern.test(value) ? value : fail(at, needs));

/**
 * @template T
 * @param {Shape<T>} of
 * @returns {Shape<T[]>}
 */
export const list = (of, needs = "an array") => (value, at) =>
  (Array.isArray(value) ? value.map((one, i) => of(one, `${at}[${i}]`)) : fail(at, needs));

/**
 * @template T
 * @param {Shape<T>} of
 * @returns {Shape<Record<string, T>>}
 */
export const record = (of) => (value, at) =>
  Object.fromEntries(Object.entries(object(value, at)).map(([key, one]) => [key, of(one, `${at}.${key}`)]));

/**
 * A field that may be absent or null.
 * @template T
 * @param {Shape<T>} of
 * @returns {Shape<T | undefined>}
 */
export const optional = (of) => (value, at) => (value === undefined || value === null ? undefined : of(value, at));

/**
 * @template T
 * @param {Shape<T>} of
 * @returns {Shape<T | null>}
 */
export const nullable = (of) => (value, at) => (value === null ? null : of(value, at));

/**
 * A field with a value in its place where it is absent or null.
 * @template T
 * @param {Shape<T>} of
 * @param {T} absent
 * @returns {Shape<T>}
 */
export const or = (of, absent) => (value, at) => optional(of)(value, at) ?? absent;

/**
 * An object of these fields; others are left out.
 * @template {object} T
 * @param {Fields<T>} of
 * @returns {Shape<T>}
 */
export const fields = (of) => (value, at) => {
  const from = object(value, at), /** @type {Record<string, unknown>} */ taken = {};
  for (const name of /** @type {(keyof T & string)[]} */ (Object.keys(of))) {
    const one = of[name](Object.hasOwn(from, name) ? from[name] : undefined, `${at}.${name}`);
    if (one !== undefined) taken[name] = one;
  }
  return /** @type {T} */ (taken);
};
