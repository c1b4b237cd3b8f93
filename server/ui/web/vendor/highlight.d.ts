import type {HLJSApi} from "highlight.js";

declare const core: HLJSApi;
export default core;
