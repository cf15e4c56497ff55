//! Graphs before anything runs: making, copying and ending them, and the order of their nodes.

use std::collections::{BTreeMap, BTreeSet};

use crate::backing::Backing;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::space;
use crate::state::State;
use crate::state::graph::{Graph, Node, NodeKind};
use crate::state::memory::{ALIGN, Kind, PAGE};

/// An empty graph.
pub(crate) fn create(state: &mut State, context: u64) -> u64 {
    let handle = state.handle();
    state.graphs.graphs.insert(handle, Graph { context, ..Graph::default() });
    handle
}

/// What a node depends on.
pub(crate) fn dependencies(state: &State, node: u64) -> Vec<u64> {
    state.graphs.nodes.get(&node).map_or_else(Vec::new, |n| n.after.clone())
}

/// Adds a node behind others of the same graph.
pub(crate) fn add(state: &mut State, graph: u64, after: &[u64], kind: NodeKind) -> Cu<u64> {
    state.graphs.get(graph)?;
    for before in after {
        if state.graphs.node(*before)?.graph != graph {
            return Err(Code::INVALID_VALUE);
        }
    }
    let kind = match kind {
        NodeKind::Child(child) => {
            let copy = clone(state, child)?;
            if let Some(entry) = state.graphs.graphs.get_mut(&copy) {
                entry.parent = Some(graph);
            }
            NodeKind::Child(copy)
        }
        other => other,
    };
    let handle = state.handle();
    let node = Node { graph, kind, after: after.to_vec(), original: None };
    state.graphs.nodes.insert(handle, node);
    if let Some(entry) = state.graphs.graphs.get_mut(&graph) {
        entry.nodes.push(handle);
    }
    Ok(handle)
}

/// Addresses for an allocation node. They are the graph's from here on; memory comes when it runs.
pub(crate) fn reserve_addresses(driver: &Driver, state: &mut State, device: usize, bytes: u64) -> Cu<u64> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let size = bytes.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?;
    let base = space::reserve(size, PAGE.max(ALIGN), false).ok_or(Code::OUT_OF_MEMORY)?;
    let content = Backing::new(driver.config.backing_bytes);
    state.memory.insert_device(base, (bytes, device, 0), Kind::Graph, content);
    Ok(base)
}

/// A graph with equal nodes; each knows which one it stands for.
pub(crate) fn clone(state: &mut State, graph: u64) -> Cu<u64> {
    let source = state.graphs.get(graph)?.clone();
    let copy = create(state, source.context);
    let mut names: BTreeMap<u64, u64> = BTreeMap::new();
    for node in &source.nodes {
        let old = state.graphs.node(*node)?.clone();
        let after: Vec<u64> = old.after.iter().filter_map(|n| names.get(n).copied()).collect();
        let new = add(state, copy, &after, old.kind)?;
        if let Some(place) = state.graphs.nodes.get_mut(&new) {
            place.original = Some(*node);
        }
        names.insert(*node, new);
    }
    // Dependencies that were added later may point forward in the list.
    for (old, new) in &names {
        let after = dependencies(state, *old).iter().filter_map(|n| names.get(n).copied()).collect();
        if let Some(place) = state.graphs.nodes.get_mut(new) {
            place.after = after;
        }
    }
    Ok(copy)
}

/// Ends a graph. What has been instantiated from it stays.
pub(crate) fn destroy(state: &mut State, handle: u64) -> Cu {
    let graph = state.graphs.get(handle)?.clone();
    state.graphs.graphs.remove(&handle);
    for node in graph.nodes {
        let removed = state.graphs.nodes.remove(&node);
        if let Some(Node { kind: NodeKind::Child(child), .. }) = removed {
            destroy(state, child)?;
        }
    }
    for (object, count) in graph.objects {
        state.user_objects.release(object, count);
    }
    Ok(())
}

/// Takes a node out; what depended on it no longer does.
pub(crate) fn destroy_node(state: &mut State, handle: u64) -> Cu {
    let graph = state.graphs.node(handle)?.graph;
    let removed = state.graphs.nodes.remove(&handle);
    if let Some(entry) = state.graphs.graphs.get_mut(&graph) {
        entry.nodes.retain(|n| *n != handle);
    }
    for node in state.graphs.nodes.values_mut().filter(|n| n.graph == graph) {
        node.after.retain(|n| *n != handle);
    }
    match removed {
        Some(Node { kind: NodeKind::Child(child), .. }) => destroy(state, child),
        _ => Ok(()),
    }
}

/// Nodes in an order in which each comes behind what it depends on.
///
/// # Errors
/// `INVALID_VALUE` for a circle.
pub(crate) fn order(state: &State, graph: u64) -> Cu<Vec<u64>> {
    let nodes = &state.graphs.get(graph)?.nodes;
    let mut placed: BTreeSet<u64> = BTreeSet::new();
    let mut sorted = Vec::with_capacity(nodes.len());
    let mut open: Vec<u64> = nodes.clone();
    while !open.is_empty() {
        let (ready, rest): (Vec<u64>, Vec<u64>) =
            open.into_iter().partition(|n| dependencies(state, *n).iter().all(|b| placed.contains(b)));
        if ready.is_empty() {
            return Err(Code::INVALID_VALUE);
        }
        placed.extend(&ready);
        sorted.extend(ready);
        open = rest;
    }
    Ok(sorted)
}
