//! Watches as streams of lines.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::api::{ApiServer, Target, show};
use crate::audit::ChangeKind;
use crate::error::ApiError;
use crate::faults::{Fault, WatchControl, WatchEnd};
use crate::selector::Selector;
use crate::store::Change;
use crate::value::set;

const BATCH: usize = 256;
/// Watches that are to last longer than this end with a bookmark.
const LAST_BOOKMARK: Duration = Duration::from_secs(2);

/// The query of a watch.
#[derive(Debug, Clone)]
pub(crate) struct WatchOptions {
    pub(crate) selector: Selector,
    pub(crate) resource_version: String,
    pub(crate) send_initial_events: bool,
    pub(crate) bookmarks: bool,
    pub(crate) timeout: Duration,
    /// Show metadata only.
    pub(crate) partial: bool,
}

/// The connection is to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the watch is broken off")]
pub(crate) struct Broken;

struct Watching {
    server: Arc<ApiServer>,
    target: Target,
    options: WatchOptions,
    /// Everything up to here has been sent.
    revision: u64,
    changed: watch::Receiver<u64>,
    lines: VecDeque<Bytes>,
    deadline: Instant,
    control: Arc<WatchControl>,
    fault: Option<Fault>,
    sent: u64,
    over: bool,
    /// Its drop marks the watch as closed.
    _open: tokio_util::sync::DropGuard,
}

/// Starts a watch.
pub(crate) fn watch(
    server: Arc<ApiServer>,
    target: Target,
    options: WatchOptions,
    control: Arc<WatchControl>,
    fault: Option<Fault>,
) -> Result<impl Stream<Item = Result<Bytes, Broken>> + Send, ApiError> {
    let asked = match options.resource_version.as_str() {
        "" => 0,
        v => v.parse::<u64>().map_err(|_| {
            ApiError::new(500, "", format!("resourceVersion: Invalid value: {v:?}: not a number"))
        })?,
    };
    let changed = server.store.subscribe(&target.kind.table());
    let deadline = Instant::now() + options.timeout;
    let open = control.stop.clone().drop_guard();
    let mut state = Watching {
        server,
        target,
        options,
        revision: asked,
        changed,
        lines: VecDeque::new(),
        deadline,
        control,
        fault,
        sent: 0,
        over: false,
        _open: open,
    };
    if asked == 0 || state.options.send_initial_events {
        state.start_with_everything();
    }
    Ok(futures::stream::unfold(state, |mut state| async move {
        let item = state.next().await?;
        Some((item, state))
    }))
}

impl Watching {
    fn start_with_everything(&mut self) {
        let snapshot = self.server.store.list(&self.target.kind.table(), &self.target.namespace);
        self.revision = snapshot.revision;
        for (_, stored) in snapshot.items {
            if self.options.selector.matches(&stored.object) {
                self.push("ADDED", &stored.object);
            }
        }
        if self.options.send_initial_events && self.options.bookmarks {
            self.push_bookmark(true);
        }
    }

    async fn next(&mut self) -> Option<Result<Bytes, Broken>> {
        loop {
            if self.over {
                return None;
            }
            self.control.silence().await;
            if self.control.stop.is_cancelled() {
                return self.finish(self.control.end());
            }
            if let Some(end) = self.due_fault().await {
                return self.finish(end);
            }
            if let Some(line) = self.lines.pop_front() {
                self.sent += 1;
                return Some(Ok(line));
            }
            self.changed.borrow_and_update();
            match self.server.store.changes_since(&self.target.kind.table(), self.revision, BATCH) {
                Err(expired) => {
                    let text = format!("too old resource version: {} ({})", self.revision, expired.oldest);
                    self.over = true;
                    return Some(Ok(error_line(&ApiError::expired(text))));
                }
                Ok((changes, complete)) => {
                    for change in &changes {
                        self.push_change(change);
                    }
                    self.revision = self.revision.max(complete);
                    if !self.lines.is_empty() || changes.len() == BATCH {
                        continue;
                    }
                }
            }
            let bookmark = self.server.options.bookmark_interval;
            tokio::select! {
                _ = self.changed.changed() => {}
                () = self.control.stop.cancelled() => {}
                () = tokio::time::sleep_until(self.deadline) => {
                    // One last bookmark, so that the next watch starts from here.
                    if self.options.bookmarks && self.options.timeout > LAST_BOOKMARK {
                        self.over = true;
                        return Some(Ok(self.bookmark_line(false)));
                    }
                    return None;
                }
                () = tokio::time::sleep(bookmark), if self.options.bookmarks => self.push_bookmark(false),
            }
        }
    }

    /// Whether the fault of this watch strikes now.
    async fn due_fault(&mut self) -> Option<WatchEnd> {
        let (after, end) = match self.fault.as_ref()? {
            Fault::WatchClose { after_events } => (*after_events, WatchEnd::Close),
            Fault::WatchReset { after_events } => (*after_events, WatchEnd::Reset),
            Fault::WatchExpire { after_events } => (*after_events, WatchEnd::Expire),
            Fault::WatchStall { after_events, millis } => {
                let (after, pause) = (*after_events, Duration::from_millis(*millis));
                if self.sent >= after {
                    self.fault = None;
                    let stop = self.control.stop.clone();
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = stop.cancelled() => {}
                    }
                }
                return None;
            }
            _ => return None,
        };
        (self.sent >= after).then_some(end)
    }

    fn finish(&mut self, end: WatchEnd) -> Option<Result<Bytes, Broken>> {
        self.over = true;
        match end {
            WatchEnd::Close => None,
            WatchEnd::Reset => Some(Err(Broken)),
            WatchEnd::Expire => {
                let text =
                    format!("too old resource version: {} ({})", self.revision, self.server.store.revision());
                Some(Ok(error_line(&ApiError::expired(text))))
            }
        }
    }

    fn push_change(&mut self, change: &Change) {
        let namespace = &self.target.namespace;
        if !namespace.is_empty() && change.key.namespace != *namespace {
            return;
        }
        let selector = &self.options.selector;
        let before = change.previous.as_deref().is_some_and(|p| selector.matches(p));
        let after = change.kind != ChangeKind::Deleted && selector.matches(&change.object);
        match (before, after) {
            (false, true) => self.push("ADDED", &change.object),
            (true, true) => self.push("MODIFIED", &change.object),
            (true, false) => {
                // What is out of sight is shown as it last was, with the revision of the change.
                let mut last = change.previous.as_deref().cloned().unwrap_or(Value::Null);
                set(&mut last, &["metadata", "resourceVersion"], change.revision.to_string());
                self.push("DELETED", &Arc::new(last));
            }
            (false, false) => {}
        }
    }

    fn push(&mut self, event: &str, object: &Arc<Value>) {
        let shown = show(object, &self.target.kind, &self.target.version);
        let shown = if self.options.partial { Arc::new(partial(&shown)) } else { shown };
        self.lines.push_back(line(event, &shown));
    }

    fn push_bookmark(&mut self, initial: bool) {
        let line = self.bookmark_line(initial);
        self.lines.push_back(line);
    }

    fn bookmark_line(&self, initial: bool) -> Bytes {
        let mut object = json!({
            "kind": self.target.kind.kind,
            "apiVersion": self.target.api_version(),
            "metadata": {"resourceVersion": self.revision.to_string()},
        });
        if self.options.partial {
            object = partial(&object);
        }
        if initial {
            set(&mut object, &["metadata", "annotations"], json!({"k8s.io/initial-events-end": "true"}));
        }
        line("BOOKMARK", &object)
    }
}

/// Only the metadata of an object.
pub(crate) fn partial(object: &Value) -> Value {
    json!({
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": object.get("metadata").cloned().unwrap_or_else(|| json!({})),
    })
}

fn line(event: &str, object: &Value) -> Bytes {
    let mut out = format!("{{\"type\":\"{event}\",\"object\":").into_bytes();
    // Serializing a Value cannot fail: its keys are strings.
    let _ = serde_json::to_writer(&mut out, object);
    out.extend_from_slice(b"}\n");
    Bytes::from(out)
}

fn error_line(e: &ApiError) -> Bytes {
    line("ERROR", &e.status())
}
