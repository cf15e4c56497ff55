//! Lists in pages, all of one revision.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use super::{ApiServer, Target, show};
use crate::error::ApiError;
use crate::selector::Selector;
use crate::store::{Key, Snapshot};

/// The query of a list.
#[derive(Debug, Clone, Default)]
pub(crate) struct ListOptions {
    pub(crate) selector: Selector,
    pub(crate) limit: usize,
    pub(crate) continue_token: String,
    pub(crate) resource_version: String,
    pub(crate) resource_version_match: String,
}

/// One page.
pub(crate) struct ListPage {
    pub(crate) revision: u64,
    pub(crate) items: Vec<Arc<Value>>,
    pub(crate) continue_token: String,
    pub(crate) remaining: Option<usize>,
}

impl ApiServer {
    pub(crate) fn list(&self, target: &Target, options: &ListOptions) -> Result<ListPage, ApiError> {
        let table = target.kind.table();
        let token = match options.continue_token.as_str() {
            "" => None,
            t => Some(parse_token(t)?),
        };
        let snapshot = match &token {
            Some((revision, _)) => self.list_exactly(&table, &target.namespace, *revision)?,
            None => self.list_fresh(&table, target, options)?,
        };
        let mut items = Vec::new();
        let mut more: Option<Key> = None;
        let mut remaining = 0;
        let mut last: Option<Key> = None;
        for (key, stored) in snapshot.items {
            if token.as_ref().is_some_and(|(_, after)| key <= *after)
                || !options.selector.matches(&stored.object)
            {
                continue;
            }
            if options.limit > 0 && items.len() >= options.limit {
                more = more.or_else(|| last.clone());
                remaining += 1;
                continue;
            }
            last = Some(key);
            items.push(show(&stored.object, &target.kind, &target.version));
        }
        let remaining = (more.is_some() && options.selector.is_everything()).then_some(remaining);
        let continue_token = more.map(|k| make_token(snapshot.revision, &k)).unwrap_or_default();
        Ok(ListPage { revision: snapshot.revision, items, continue_token, remaining })
    }

    fn list_fresh(&self, table: &str, target: &Target, options: &ListOptions) -> Result<Snapshot, ApiError> {
        let asked = match options.resource_version.as_str() {
            "" => 0,
            v => v
                .parse::<u64>()
                .map_err(|_| ApiError::bad_request(format!("invalid resource version {v:?}")))?,
        };
        if options.resource_version_match == "Exact" {
            return self.list_exactly(table, &target.namespace, asked);
        }
        let now = self.store.revision();
        if asked > now {
            let mut e =
                ApiError::new(504, "Timeout", format!("Too large resource version: {asked}, current: {now}"));
            e.details = Some(json!({"causes": [{
                "reason": "ResourceVersionTooLarge", "message": "Too large resource version",
            }]}));
            e.retry_after = Some(1);
            return Err(e);
        }
        Ok(self.store.list(table, &target.namespace))
    }

    fn list_exactly(&self, table: &str, namespace: &str, revision: u64) -> Result<Snapshot, ApiError> {
        self.store.list_at(table, namespace, revision).map_err(|e| {
            ApiError::expired(format!(
                "The provided continue parameter is too old to display a consistent list result: \
                 history begins at {}; start a new list without the continue parameter",
                e.oldest
            ))
        })
    }
}

fn make_token(revision: u64, after: &Key) -> String {
    let text = json!({"rv": revision, "ns": after.namespace, "name": after.name}).to_string();
    URL_SAFE_NO_PAD.encode(text)
}

fn parse_token(token: &str) -> Result<(u64, Key), ApiError> {
    let wrong = || ApiError::bad_request("continue key is not valid");
    let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| wrong())?;
    let value: Value = serde_json::from_slice(&bytes).map_err(|_| wrong())?;
    let revision = value.get("rv").and_then(Value::as_u64).ok_or_else(wrong)?;
    let field = |name| crate::value::text(&value, &[name]).to_owned();
    Ok((revision, Key { namespace: field("ns"), name: field("name") }))
}
