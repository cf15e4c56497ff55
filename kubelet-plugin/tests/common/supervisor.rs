//! A supervisor of MPS daemons that keeps its side of the contract and runs none.

use aliquot_mps::contract::{Announced, Ask, MpsDir, Phase, Sole, State, Version};
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Daemons start, and end.
    Works,
    /// No daemon can be started.
    Fails(&'static str),
    /// It does nothing, as if it hung.
    Nothing,
}

pub struct Supervisor {
    dir: MpsDir,
    answer: Arc<Mutex<Answer>>,
    stop: Arc<AtomicBool>,
    task: Option<JoinHandle<()>>,
}

impl Supervisor {
    /// Takes the lock and serves until dropped.
    pub fn start(dir: PathBuf) -> Self {
        let dir = MpsDir::new(dir);
        let sole = Sole::take(&dir).unwrap();
        for claim in dir.claims().unwrap() {
            claim.remove_state().unwrap();
        }
        let announced = sole.announce().unwrap();
        let answer = Arc::new(Mutex::new(Answer::Works));
        let stop = Arc::new(AtomicBool::new(false));
        let task = thread::spawn({
            let (dir, answer, stop) = (dir.clone(), Arc::clone(&answer), Arc::clone(&stop));
            move || serve(&dir, &answer, &stop, announced)
        });
        Self { dir, answer, stop, task: Some(task) }
    }

    pub fn answers(&self, answer: Answer) {
        *self.answer.lock() = answer;
    }

    /// What is asked for now.
    pub fn asks(&self) -> Vec<Ask> {
        self.dir.claims().unwrap().iter().filter_map(|claim| claim.ask().unwrap()).collect()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = self.task.take().map(JoinHandle::join);
    }
}

fn serve(dir: &MpsDir, answer: &Mutex<Answer>, stop: &AtomicBool, _announced: Announced) {
    while !stop.load(Ordering::SeqCst) {
        let answer = *answer.lock();
        for claim in dir.claims().unwrap_or_default().iter().filter(|_| answer != Answer::Nothing) {
            let (state, reason) = match answer {
                Answer::Fails(reason) => (Phase::Failed, Some(reason.to_owned())),
                Answer::Works | Answer::Nothing => (Phase::Ready, None),
            };
            // The agent may remove the directory at any moment.
            let _ = match (claim.ask(), claim.state()) {
                (Ok(Some(_)), Ok(None)) => {
                    claim.write_state(&State { version: Version, state, reason, pid: None, restarts: 0 })
                }
                (Ok(None), Ok(Some(_))) => claim.remove_state(),
                _ => Ok(()),
            };
        }
        thread::sleep(Duration::from_millis(2));
    }
}
