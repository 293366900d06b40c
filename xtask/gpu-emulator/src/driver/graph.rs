//! Graphs of what was captured.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::channel::Draws;
use super::code::Result;
use super::config::config;
use super::context::Core;
use super::point::Point;
use super::stream::Stream;
use super::table::{Handle, Table, new_handle};
use super::work::Work;

/// One operation of a graph.
#[derive(Clone)]
pub struct Node {
    pub work: Work,
    /// The nodes it depends on.
    pub after: Vec<usize>,
    /// The stream it was captured on.
    pub stream: Handle,
}

/// A graph that can be launched.
pub struct Exec {
    nodes: Vec<Node>,
    /// Nodes of one stream each, which are in order.
    branches: Vec<Vec<usize>>,
    /// The end of its last launch: it never runs twice at once.
    last: Mutex<Arc<Point>>,
}

/// One launch.
pub struct Run {
    exec: Arc<Exec>,
    before: Arc<Point>,
}

static GRAPHS: Table<Vec<Node>> = Table::new();
static EXECS: Table<Exec> = Table::new();

/// A graph of these nodes.
pub fn keep(nodes: Vec<Node>) -> Handle {
    let handle = new_handle();
    GRAPHS.insert(handle, Arc::new(nodes));
    handle
}

pub fn destroy(graph: Handle) -> Result<()> {
    GRAPHS.remove(graph).map(drop)
}

/// How many nodes a graph has.
pub fn nodes(graph: Handle) -> Result<usize> {
    Ok(GRAPHS.get(graph)?.len())
}

pub fn instantiate(graph: Handle) -> Result<Handle> {
    let nodes = GRAPHS.get(graph)?.to_vec();
    let mut branches: HashMap<Handle, Vec<usize>> = HashMap::new();
    for (i, node) in nodes.iter().enumerate() {
        branches.entry(node.stream).or_default().push(i);
    }
    let (branches, last) = (branches.into_values().collect(), Arc::new(Point::past()));
    let handle = new_handle();
    EXECS.insert(handle, Arc::new(Exec { nodes, branches, last: Mutex::new(last) }));
    Ok(handle)
}

/// Launches of it go on to their ends.
pub fn destroy_exec(exec: Handle) -> Result<()> {
    EXECS.remove(exec).map(drop)
}

pub fn launch(exec: Handle, stream: &Stream) -> Result<()> {
    let exec = EXECS.get(exec)?;
    let done = Arc::new(Point::default());
    let mut last = exec.last.lock();
    let run = Run { exec: exec.clone(), before: last.clone() };
    stream.submit_with(Work::Graph(Arc::new(run)), done.clone())?;
    // A launch inside a capture is one of the graph that it is captured into.
    if stream.capture.lock().is_none() {
        *last = done;
    }
    Ok(())
}

impl Run {
    /// Runs all branches and waits for their ends.
    pub fn run(&self, core: &Core) {
        self.before.wait();
        let done: Vec<Point> = self.exec.nodes.iter().map(|_| Point::default()).collect();
        std::thread::scope(|scope| {
            let mut branches = self.exec.branches.iter();
            let first = branches.next();
            for branch in branches {
                scope.spawn(|| self.branch(branch, &done, core));
            }
            if let Some(branch) = first {
                self.branch(branch, &done, core);
            }
        });
    }

    fn branch(&self, branch: &[usize], done: &[Point], core: &Core) {
        static BRANCHES: AtomicU64 = AtomicU64::new(0);
        let seed = config().map_or(0, |config| config.seed);
        let mut draws = Draws::new(seed ^ BRANCHES.fetch_add(1, Ordering::Relaxed) << 20);
        for &i in branch {
            let node = &self.exec.nodes[i];
            node.after.iter().for_each(|&before| done[before].wait());
            if core.check().is_ok() {
                draws.delay();
                node.work.run(core);
            }
            done[i].complete();
        }
    }
}
