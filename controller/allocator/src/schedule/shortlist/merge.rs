//! Merges sorted lists of nodes.

use crate::snapshot::Sym;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::iter::Peekable;

/// Nodes, sorted by their first field. A node with several GPUs in the list comes several times in a row.
type List<'s> = Box<dyn Iterator<Item = (i64, Sym)> + 's>;

/// The nodes of several sorted lists in a common order, each once; they are merged lazily.
pub(super) struct Merge<'s> {
    nodes: Peekable<Heads<'s>>,
}

impl<'s> Merge<'s> {
    /// Merges lists, each with the number of places that one of its GPUs has.
    pub(super) fn new(lists: Vec<(List<'s>, u32)>) -> Self {
        let mut heads = Heads { heads: BinaryHeap::with_capacity(lists.len()), lists };
        (0..heads.lists.len()).for_each(|list| heads.advance(list));
        Self { nodes: heads.peekable() }
    }
}

impl Iterator for Merge<'_> {
    /// A node, and the number of places of its GPUs together.
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
    /// The next node of each list.
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
