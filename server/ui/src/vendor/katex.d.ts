export {default} from "katex";
