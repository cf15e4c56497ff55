//! What nodes publish, apart from what is taken of it.

use super::{Index, Layout, Pool, Sym};
use crate::selector::AttributeValue;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Index {
    /// A copy that only tells what is published and which classes there are, and does not change any more. Layouts
    /// are those of this index; pods, claims, nodes and what is taken are left out.
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

    /// What is published, of nodes of one make once: the others differ from it in nothing but what
    /// identifies a device.
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

    /// The layouts with a device that has one of these values of an attribute of the driver's domain.
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
    /// Without what is taken, and by whom, and without the slices that it is made of.
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
