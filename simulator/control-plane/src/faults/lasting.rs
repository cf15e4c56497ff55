//! What lasts beyond one request: users that are cut off, watches that are silent, requests on record.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Call, Fault, Faults, Matcher, Verdict, WatchEnd};

#[derive(Default)]
pub(super) struct Lasting {
    /// Users that are cut off, and whether the request that did it is over.
    cut: HashMap<String, bool>,
    noted: Vec<Call>,
}

impl Lasting {
    /// Nothing that a user sends who is cut off is carried out.
    pub(super) fn judge(&self, call: &Call) -> Option<Verdict> {
        let fault = self.cut.contains_key(&call.user).then_some(Fault::CutOff { carried_out: false });
        fault.map(|fault| Verdict { fault: Some(fault), ..Verdict::default() })
    }

    /// Begins what a fault brings about besides what becomes of the request itself; false if that is all of it.
    pub(super) fn begin(&mut self, fault: &Fault, call: &Call, silence: &Silence) -> bool {
        match fault {
            Fault::Note => self.noted.push(call.clone()),
            Fault::Silence { resource } => {
                silence.begin(Matcher::new("watch", resource).by(&call.user));
            }
            Fault::CutOff { carried_out } => {
                self.cut.insert(call.user.clone(), !carried_out);
                return true;
            }
            _ => return true,
        }
        false
    }
}

/// Which watches are silent.
#[derive(Default)]
pub(super) struct Silence {
    matchers: Mutex<Vec<Matcher>>,
    changed: watch::Sender<()>,
}

impl Silence {
    fn begin(&self, matcher: Matcher) {
        self.matchers.lock().push(matcher);
        self.changed.send_replace(());
    }

    fn end(&self) {
        self.matchers.lock().clear();
        self.changed.send_replace(());
    }

    fn is_about(&self, call: &Call) -> bool {
        self.matchers.lock().iter().any(|matcher| matcher.matches(call))
    }
}

/// What silence means for one watch.
pub(super) struct Ear {
    pub(super) silence: Arc<Silence>,
    pub(super) stop: CancellationToken,
}

impl Ear {
    /// Waits while a watch is silent, unless it is ended.
    pub(super) async fn wait(&self, call: &Call) {
        let mut changed = self.silence.changed.subscribe();
        while self.silence.is_about(call) {
            tokio::select! {
                _ = changed.changed() => {}
                () = self.stop.cancelled() => return,
            }
        }
    }
}

impl Faults {
    /// From now on matching watches say nothing, those that are open and those to come; lists are as fresh as ever.
    pub fn silence(&self, matches: Matcher) {
        self.silence.begin(matches);
    }

    /// Ends all silence. Watches go on with what they have not said, late; or they are ended so, and with
    /// [`WatchEnd::Expire`] their clients list anew and never see what came and went meanwhile.
    pub fn end_silence(&self, how: Option<WatchEnd>) {
        let silent = self.silence.matchers.lock().clone();
        // Before anything is heard of them.
        if let Some(how) = how {
            for matcher in &silent {
                self.end_watches(matcher, how);
            }
        }
        self.silence.end();
    }

    /// Whether a user is cut off by now, and the request that did it is over.
    #[must_use]
    pub fn is_cut_off(&self, user: &str) -> bool {
        self.state.lock().lasting.cut.get(user).copied().unwrap_or_default()
    }

    /// The requests that [`Fault::Note`] put on record, in their order.
    #[must_use]
    pub fn noted(&self) -> Vec<Call> {
        self.state.lock().lasting.noted.clone()
    }

    pub(crate) fn was_carried_out(&self, user: &str) {
        self.state.lock().lasting.cut.insert(user.to_owned(), true);
    }

    pub(super) fn end_lasting(&self) {
        self.state.lock().lasting = Lasting::default();
        self.silence.end();
    }
}
