//! Sorted lists of nodes as one.

use crate::index::Sym;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::iter::Peekable;

/// Nodes, sorted by what stands first; one with several GPUs of the list comes several times in a row.
type List<'s> = Box<dyn Iterator<Item = (i64, Sym)> + 's>;

/// Nodes of several sorted lists in the order of all, each once, found out as they are asked for.
pub(super) struct Merge<'s> {
    nodes: Peekable<Heads<'s>>,
}

impl<'s> Merge<'s> {
    /// Of lists, each with what a GPU of it has to give.
    pub(super) fn new(lists: Vec<(List<'s>, u32)>) -> Self {
        let mut heads = Heads { heads: BinaryHeap::with_capacity(lists.len()), lists };
        (0..heads.lists.len()).for_each(|list| heads.advance(list));
        Self { nodes: heads.peekable() }
    }
}

impl Iterator for Merge<'_> {
    /// A node, and what its GPUs have to give together.
    type Item = (Sym, u32);

    fn next(&mut self) -> Option<(Sym, u32)> {
        let (node, mut gives) = self.nodes.next()?;
        while let Some((_, more)) = self.nodes.next_if(|(other, _)| *other == node) {
            gives += more;
        }
        Some((node, gives))
    }
}

struct Heads<'s> {
    lists: Vec<(List<'s>, u32)>,
    /// The next of each list.
    heads: BinaryHeap<Reverse<(i64, Sym, usize)>>,
}

impl Heads<'_> {
    fn advance(&mut self, list: usize) {
        let next = self.lists.get_mut(list).and_then(|(nodes, _)| nodes.next());
        self.heads.extend(next.map(|(by, node)| Reverse((by, node, list))));
    }
}

impl Iterator for Heads<'_> {
    type Item = (Sym, u32);

    fn next(&mut self) -> Option<(Sym, u32)> {
        let Reverse((_, node, list)) = self.heads.pop()?;
        self.advance(list);
        Some((node, self.lists.get(list).map_or(0, |(_, gives)| *gives)))
    }
}
