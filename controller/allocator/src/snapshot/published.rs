//! Copies and views of what nodes publish, without what is held of it.

use super::{Layout, Pool, Snapshot, Sym};
use crate::selector::AttributeValue;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Snapshot {
    /// Returns a copy that has only what is published and which classes there are, and that does not change
    /// any more. Its layouts are those of this snapshot. Pods, claims, nodes and what is held are left out.
    pub fn published(&self) -> Self {
        let pools = self.pools.iter().map(|(name, pool)| (*name, pool.published())).collect();
        Self {
            controller_taint: self.controller_taint.clone(),
            names: self.names.clone(),
            values: self.values.clone(),
            shapes: self.shapes.clone(),
            draws: self.draws.clone(),
            taint_lists: self.taint_lists.clone(),
            classes: self.classes.clone(),
            pools,
            makes: Some(self.layouts_of_makes().cloned().collect()),
            ..Self::new(self.driver())
        }
    }

    /// Returns the layouts that are published, one for each make of node: nodes of one make differ only in
    /// what identifies a device.
    pub fn makes_published(&self) -> impl Iterator<Item = &Arc<Layout>> {
        let known = self.makes.as_deref();
        let found = known.is_none().then(|| self.layouts_of_makes());
        known.into_iter().flatten().chain(found.into_iter().flatten())
    }

    fn layouts_of_makes(&self) -> impl Iterator<Item = &Arc<Layout>> {
        let (mut makes, mut others) = (BTreeSet::new(), BTreeSet::new());
        self.pools().filter_map(move |pool| {
            let layout = pool.layout.as_ref()?;
            let first = match self.fleet.row(pool.name) {
                Some(row) => makes.insert(row.make),
                None => others.insert(self.make_of(layout)),
            };
            first.then_some(layout)
        })
    }

    /// Returns the layouts with a device whose attribute has one of these values; the attribute is in the
    /// driver's domain unless it names another.
    pub fn layouts_with<'a>(
        &'a self,
        attribute: &str,
        values: &[&str],
    ) -> impl Iterator<Item = &'a Arc<Layout>> + use<'a> {
        let name = self.find_qualified(attribute);
        let value = |text: &&str| self.values.find(&AttributeValue::Text((*text).into()));
        let values: BTreeSet<u32> = values.iter().filter_map(value).collect();
        let has = move |layout: &Layout, name: Sym| {
            let column = layout.column(name);
            column.is_some_and(|column| column.values().any(|value| values.contains(&value)))
        };
        self.pools()
            .filter_map(|pool| pool.layout.as_ref())
            .filter(move |layout| name.is_some_and(|name| has(layout, name)))
    }
}

impl Pool {
    /// Returns a copy without holders, usage and slices.
    fn published(&self) -> Self {
        Self {
            node: self.node.clone(),
            state: self.state.clone(),
            layout: self.layout.clone(),
            version: self.version,
            ..Self::new(self.name)
        }
    }
}
