// Types of web/vendor/preact.js, which scripts/vendor-page builds from these packages.

import type {VNode} from "preact";

export {Component, Fragment, h, render} from "preact";
export type {ComponentChildren, RefObject, VNode} from "preact";
export * from "preact/hooks";
export declare const html: (strings: TemplateStringsArray, ...values: unknown[]) => VNode;
