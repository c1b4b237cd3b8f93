// Conversations that two tabs have changed: both sides' changes since the state that both know. Pure functions.
import { added, chosen, numberOf, order } from "./tree.js";
/** `theirs` with what `ours` has changed since `base`, field by field. */
export function merged(base, ours, theirs) {
    const next = { ...theirs };
    for (const name of new Set([...Object.keys(base), ...Object.keys(ours)])) {
        if (ours[name] === base[name])
            continue;
        if (name in ours)
            next[name] = ours[name];
        else
            delete next[name];
    }
    return next;
}
const GROWING = ["content", "thought", "tokens", "calls", "status", "error", "timings", "stream"];
/** One answer that both sides have changed; null where neither text is the other's beginning. */
function grown(base, ours, theirs) {
    const length = (one) => one.content.length + (one.thought?.length ?? 0);
    const ourEnd = length(ours) > length(theirs) || (length(ours) === length(theirs) && theirs.status === "running");
    const [less, more] = ourEnd ? [theirs, ours] : [ours, theirs];
    if (!more.content.startsWith(less.content) || !(more.thought ?? "").startsWith(less.thought ?? ""))
        return null;
    const next = { ...merged(base ?? {}, ours, theirs) };
    for (const name of GROWING) {
        if (name in more)
            next[name] = more[name];
        else
            delete next[name];
    }
    return next;
}
/** A conversation with the changes of both sides; nothing that only one side has written gets lost. */
export function joinedSides(base, ours, theirs, tag) {
    const { nodes: _, ...head } = merged(base, ours, theirs);
    const nodes = { ...theirs.nodes }, apart = [];
    for (const [id, mine] of Object.entries(ours.nodes)) {
        const before = base.nodes[id], other = theirs.nodes[id];
        if (mine === before)
            continue;
        if (!other || other === before)
            nodes[id] = mine;
        else if (mine.role === "assistant" && other.role === "assistant") {
            const both = grown(before?.role === "assistant" ? before : undefined, mine, other);
            if (both)
                nodes[id] = both;
            else
                apart.push(mine);
        }
        else
            nodes[id] = merged(before ?? {}, mine, other);
    }
    for (const [id, before] of Object.entries(base.nodes))
        if (!ours.nodes[id] && theirs.nodes[id] === before)
            delete nodes[id];
    for (const id of Object.keys(nodes)) // what one side has deleted, the other may have gone on with
        for (let parent = nodes[id]?.parent; parent && !nodes[parent]; parent = nodes[parent]?.parent) {
            const back = theirs.nodes[parent] ?? ours.nodes[parent] ?? base.nodes[parent];
            if (!back)
                break;
            nodes[parent] = back;
        }
    const settings = ours.settings === base.settings ? theirs.settings : merged(base.settings, ours.settings, theirs.settings);
    let next = { ...head, settings, nodes: sorted(nodes) };
    for (const { id: __, parent, ...rest } of apart)
        next = added(next, parent, rest, tag);
    return next.leaf && next.nodes[next.leaf] ? chosen(next, next.leaf) : withLeaf(next);
}
/** Messages in the order of their ids, each below one that is there. */
export function sorted(nodes) {
    const entries = Object.entries(nodes).sort(([a, one], [b, other]) => numberOf(a) - numberOf(b) || (one.at ?? 0) - (other.at ?? 0) || order(a, b));
    return Object.fromEntries(entries.map(([id, node]) => [id, node.parent && !nodes[node.parent] ? { ...node, parent: null } : node]));
}
function withLeaf(conversation) {
    const root = Object.values(conversation.nodes).findLast(node => !node.parent);
    return root ? chosen(conversation, root.id) : { ...conversation, leaf: null };
}
