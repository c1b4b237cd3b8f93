export {Marked} from "marked";
export type {MarkedExtension, MarkedToken, Token, Tokens} from "marked";
