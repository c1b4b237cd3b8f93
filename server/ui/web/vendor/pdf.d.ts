export {getDocument} from "pdfjs-dist";
