//! A fake OpenAI-compatible engine that costs about 15 us a request, so that a gateway is what is measured.
//! One thread, one epoll loop, one write() per token event. Tokens are 4 bytes of prompt or answer.

use crate::json::{esc, parse, Json};
use crate::sys::*;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::fmt::Write as _;
use std::net::TcpListener;
use std::os::unix::io::{AsRawFd, IntoRawFd, RawFd};

const LISTEN: u64 = u64::MAX;
const BLOCK: usize = 64; // bytes of prompt text = 16 "tokens" of 4 bytes
const TOK: usize = 4;

#[derive(Clone)]
pub struct Config {
    pub port: u16,
    pub model: String,
    pub ttft_us: u64,
    pub itl_us: u64,
    pub tokens: u32,
    pub cache_blocks: usize,
    pub prefill_us: u64, // per uncached block
    pub serial: bool,    // prefills of one engine queue behind one another
    pub max_running: usize,
    pub kv_blocks: usize, // denominator of kv_cache_usage_perc when no cache is simulated
}

impl Config {
    pub fn set(&mut self, k: &str, v: &str) -> bool {
        let f: f64 = match k {
            "model" => {
                self.model = v.into();
                return true;
            }
            _ => match v.parse() {
                Ok(f) => f,
                Err(_) => return false,
            },
        };
        match k {
            "port" => self.port = f as u16,
            "ttft_ms" => self.ttft_us = (f * 1000.0) as u64,
            "itl_ms" => self.itl_us = (f * 1000.0) as u64,
            "tokens" => self.tokens = f as u32,
            "cache_blocks" => self.cache_blocks = f as usize,
            "prefill_us" => self.prefill_us = f as u64,
            "serial" => self.serial = f != 0.0,
            "max_running" => self.max_running = f as usize,
            "kv_blocks" => self.kv_blocks = f as usize,
            _ => return false,
        }
        true
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            port: 0,
            model: "sim".into(),
            ttft_us: 0,
            itl_us: 0,
            tokens: 32,
            cache_blocks: 0,
            prefill_us: 0,
            serial: true,
            max_running: 0,
            kv_blocks: 20000,
        }
    }
}

/// LRU set of block hashes.
struct Lru {
    map: HashMap<u64, u32>,
    node: Vec<(u64, u32, u32)>, // key, prev, next; node 0 is the sentinel
    cap: usize,
}

impl Lru {
    fn new(cap: usize) -> Lru {
        Lru { map: HashMap::new(), node: vec![(0, 0, 0)], cap }
    }
    fn unlink(&mut self, i: u32) {
        let (_, p, n) = self.node[i as usize];
        self.node[p as usize].2 = n;
        self.node[n as usize].1 = p;
    }
    fn front(&mut self, i: u32) {
        let h = self.node[0].2;
        self.node[i as usize].1 = 0;
        self.node[i as usize].2 = h;
        self.node[h as usize].1 = i;
        self.node[0].2 = i;
    }
    fn prefix_len(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|b| self.map.contains_key(b)).count()
    }
    /// Touch back to front, so that a chain's tail is evicted before its head (as vLLM frees).
    fn put(&mut self, blocks: &[u64]) {
        if self.cap == 0 {
            return;
        }
        for &b in blocks.iter().rev() {
            let i = match self.map.get(&b) {
                Some(&i) => {
                    self.unlink(i);
                    i
                }
                None if self.map.len() >= self.cap => {
                    let i = self.node[0].1; // oldest
                    self.unlink(i);
                    let old = self.node[i as usize].0;
                    self.map.remove(&old);
                    self.node[i as usize].0 = b;
                    self.map.insert(b, i);
                    i
                }
                None => {
                    self.node.push((b, 0, 0));
                    let i = (self.node.len() - 1) as u32;
                    self.map.insert(b, i);
                    i
                }
            };
            self.front(i);
        }
    }
}

fn chain(mut h: u64, text: &[u8], out: &mut Vec<u64>) -> u64 {
    for b in text.chunks_exact(BLOCK) {
        for w in b.chunks_exact(8) {
            h = (h.rotate_left(23) ^ u64::from_le_bytes(w.try_into().unwrap()))
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        h ^= h >> 31;
        out.push(h);
    }
    h
}

/// The prompt text, independent of how a gateway re-serialised the JSON.
fn prompt_text(j: &Json, chat: bool) -> Vec<u8> {
    let mut text: Vec<u8> = Vec::new();
    if !chat {
        text.extend_from_slice(j.get("prompt").and_then(|p| p.str()).unwrap_or("").as_bytes());
        return text;
    }
    for m in j.get("messages").map(|m| m.arr()).unwrap_or(&[]) {
        text.extend_from_slice(b"<|");
        text.extend_from_slice(m.get("role").and_then(|r| r.str()).unwrap_or("").as_bytes());
        text.extend_from_slice(b"|>");
        match m.get("content") {
            Some(Json::Str(s)) => text.extend_from_slice(s.as_bytes()),
            Some(Json::Arr(a)) => {
                for x in a {
                    text.extend_from_slice(x.get("text").and_then(|t| t.str()).unwrap_or("").as_bytes())
                }
            }
            _ => {}
        }
        text.push(b'\n');
    }
    text.extend_from_slice(b"<|assistant|>");
    text
}

struct Request {
    stream: bool,
    chat: bool,
    usage: bool,
    tokens: u32,
    sent: u32,
    seed: u8,
    id: u64,
    prompt_toks: usize,
    cached_toks: usize,
    blocks: Vec<u64>,
    tail: Vec<u8>, // prompt text past the last full block
    itl_us: u64,
    started: bool,
    head_sent: bool,
    ev: Vec<u8>,  // one framed token event
    patch: usize, // where its 4-byte token stands
    kv: usize,
}

#[derive(Default)]
struct Conn {
    fd: RawFd,
    gen: u32,
    open: bool,
    inb: Vec<u8>,
    out: Vec<u8>,
    outpos: usize,
    want_out: bool,
    close_after: bool,
    req: Option<Box<Request>>,
    blocked: bool, // a zero-delay stream waiting for the socket
}

#[derive(Default)]
struct Stats {
    requests: u64,
    finished: u64,
    aborted: u64,
    events: u64,
    bad: u64,
    no_route: u64,
    tokenized: u64,
    prompt_toks: u64,
    cached_toks: u64,
    gen_toks: u64,
    conns: u64,
    peak_running: usize,
}

pub struct Engine {
    config: Config,
    epoll: Epoll,
    conns: Vec<Conn>,
    free: Vec<u32>,
    timers: BinaryHeap<Reverse<(u64, u32, u32)>>,
    ready: VecDeque<(u32, u32)>,
    waiting: VecDeque<(u32, u32)>,
    running: usize,
    kv_used: usize,
    busy_until: u64,
    lru: Lru,
    stats: Stats,
    next_id: u64,
    unknown: u32,
    rdbuf: Vec<u8>,
}

fn tok(seed: u8, n: u32) -> [u8; 4] {
    let n = n % 1000;
    [b'a' + seed % 26, b'0' + (n / 100) as u8, b'0' + (n / 10 % 10) as u8, b'0' + (n % 10) as u8]
}

fn chunk(out: &mut Vec<u8>, payload: &[u8]) {
    out.extend_from_slice(format!("{:x}\r\n", payload.len()).as_bytes());
    out.extend_from_slice(payload);
    out.extend_from_slice(b"\r\n");
}

impl Engine {
    pub fn new(config: Config) -> Engine {
        let lru = Lru::new(config.cache_blocks);
        Engine {
            config,
            epoll: Epoll::new(),
            conns: Vec::new(),
            free: Vec::new(),
            timers: BinaryHeap::new(),
            ready: VecDeque::new(),
            waiting: VecDeque::new(),
            running: 0,
            kv_used: 0,
            busy_until: 0,
            lru,
            stats: Stats::default(),
            next_id: 1,
            unknown: 0,
            rdbuf: vec![0; 1 << 18],
        }
    }

    pub fn run(&mut self) {
        let l = TcpListener::bind(("127.0.0.1", self.config.port)).expect("bind");
        set_backlog(l.as_raw_fd(), 4096);
        l.set_nonblocking(true).unwrap();
        self.epoll.add(l.as_raw_fd(), EPOLLIN, LISTEN);
        eprintln!("fake engine {} on 127.0.0.1:{}", self.config.model, l.local_addr().unwrap().port());
        let mut evs = vec![EpollEvent { events: 0, data: 0 }; 1024];
        loop {
            let timeout = if !self.ready.is_empty() {
                0
            } else if let Some(Reverse((t, _, _))) = self.timers.peek() {
                (t.saturating_sub(now_us()) as i64 + 999).min(60_000_000) as i32 / 1000
            } else {
                -1
            };
            let n = self.epoll.wait(&mut evs, timeout);
            for e in &evs[..n] {
                let (events, data) = (e.events, e.data);
                if data == LISTEN {
                    self.accept(&l);
                } else {
                    self.on_io(data as u32, (data >> 32) as u32, events);
                }
            }
            let now = now_us();
            while let Some(&Reverse((t, id, gen))) = self.timers.peek() {
                if t > now {
                    break;
                }
                self.timers.pop();
                if self.alive(id, gen) {
                    self.step(id, t, now);
                }
            }
            // one token for each zero-delay stream, as an engine's step does
            for _ in 0..self.ready.len() {
                let (id, gen) = self.ready.pop_front().unwrap();
                if self.alive(id, gen) {
                    self.step(id, now, now);
                }
            }
        }
    }

    fn alive(&self, id: u32, gen: u32) -> bool {
        let c = &self.conns[id as usize];
        c.gen == gen && c.req.is_some()
    }

    fn accept(&mut self, l: &TcpListener) {
        while let Ok((s, _)) = l.accept() {
            s.set_nonblocking(true).ok();
            let fd = s.into_raw_fd();
            set_nodelay(fd);
            let id = self.free.pop().unwrap_or_else(|| {
                self.conns.push(Conn::default());
                (self.conns.len() - 1) as u32
            });
            let c = &mut self.conns[id as usize];
            let gen = c.gen + 1;
            *c = Conn { fd, gen, open: true, ..Conn::default() };
            self.epoll.add(fd, EPOLLIN | EPOLLRDHUP, id as u64 | (gen as u64) << 32);
            self.stats.conns += 1;
        }
    }

    fn on_io(&mut self, id: u32, gen: u32, events: u32) {
        if !self.conns[id as usize].open || self.conns[id as usize].gen != gen {
            return;
        }
        if events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP) != 0 {
            return self.drop_conn(id);
        }
        if events & EPOLLOUT != 0 {
            self.flush(id);
            if !self.conns[id as usize].open {
                return;
            }
        }
        if events & EPOLLIN != 0 {
            let fd = self.conns[id as usize].fd;
            match sys_read(fd, &mut self.rdbuf) {
                Io::N(0) | Io::Err(_) => return self.drop_conn(id),
                Io::Again => {}
                Io::N(n) => {
                    self.conns[id as usize].inb.extend_from_slice(&self.rdbuf[..n]);
                    self.pump(id);
                }
            }
        }
    }

    fn drop_conn(&mut self, id: u32) {
        if let Some(r) = self.conns[id as usize].req.take() {
            self.stats.aborted += 1;
            self.end(&r);
        }
        let c = &mut self.conns[id as usize];
        sys_close(c.fd);
        c.open = false;
        c.gen += 1;
        c.inb = Vec::new();
        c.out = Vec::new();
        self.free.push(id);
    }

    /// A request leaves the engine: give back its slot and start one that waits.
    fn end(&mut self, r: &Request) {
        if !r.started {
            return;
        }
        self.running -= 1;
        self.kv_used -= r.kv;
        while self.config.max_running == 0 || self.running < self.config.max_running {
            match self.waiting.pop_front() {
                None => break,
                Some((id, gen)) if self.alive(id, gen) => self.start(id),
                Some(_) => {}
            }
        }
    }

    fn send(&mut self, id: u32, data: &[u8]) {
        let c = &mut self.conns[id as usize];
        if c.outpos < c.out.len() {
            c.out.extend_from_slice(data);
            return;
        }
        let mut done = 0;
        match sys_write(c.fd, data) {
            Io::N(n) => done = n,
            Io::Again => {}
            Io::Err(_) => return, // EPOLLHUP/RDHUP follows and counts the abort
        }
        if done < data.len() {
            c.out.clear();
            c.outpos = 0;
            c.out.extend_from_slice(&data[done..]);
            if !c.want_out {
                c.want_out = true;
                self.epoll.modify(c.fd, EPOLLIN | EPOLLRDHUP | EPOLLOUT, id as u64 | (c.gen as u64) << 32);
            }
        }
    }

    fn flush(&mut self, id: u32) {
        let c = &mut self.conns[id as usize];
        while c.outpos < c.out.len() {
            match sys_write(c.fd, &c.out[c.outpos..]) {
                Io::N(n) => c.outpos += n,
                Io::Again => return,
                Io::Err(_) => return self.drop_conn(id),
            }
        }
        c.out.clear();
        c.outpos = 0;
        if c.want_out {
            c.want_out = false;
            self.epoll.modify(c.fd, EPOLLIN | EPOLLRDHUP, id as u64 | (c.gen as u64) << 32);
        }
        if c.blocked {
            c.blocked = false;
            self.ready.push_back((id, c.gen));
        } else if c.close_after && c.req.is_none() {
            self.drop_conn(id);
        }
    }

    /// Handle whole requests in the input buffer, one at a time.
    fn pump(&mut self, id: u32) {
        loop {
            let c = &mut self.conns[id as usize];
            if !c.open || c.req.is_some() || c.inb.is_empty() {
                return;
            }
            let he = match head_end(&c.inb) {
                Some(he) => he,
                None => return,
            };
            let head = String::from_utf8_lossy(&c.inb[..he]).into_owned();
            let mut lines = head.lines();
            let first = lines.next().unwrap_or("");
            let (mut clen, mut chunked, mut close) = (0usize, false, first.ends_with("HTTP/1.0"));
            for l in lines {
                if let Some((k, v)) = l.split_once(':') {
                    let v = v.trim();
                    if k.eq_ignore_ascii_case("content-length") {
                        clen = v.parse().unwrap_or(0);
                    } else if k.eq_ignore_ascii_case("transfer-encoding") {
                        chunked = v.eq_ignore_ascii_case("chunked");
                    } else if k.eq_ignore_ascii_case("connection") {
                        close = v.eq_ignore_ascii_case("close");
                    } else if k.eq_ignore_ascii_case("expect") {
                        let fd = c.fd;
                        if c.inb.len() == he {
                            let _ = sys_write(fd, b"HTTP/1.1 100 Continue\r\n\r\n");
                        }
                    }
                }
            }
            let body: Vec<u8>;
            let used: usize;
            if chunked {
                let (mut b, mut i) = (Vec::new(), he);
                loop {
                    let p = match find_byte(&c.inb[i..], b'\n') {
                        Some(p) => p,
                        None => return,
                    };
                    let line = String::from_utf8_lossy(&c.inb[i..i + p]).trim().to_string();
                    let n = usize::from_str_radix(line.split(';').next().unwrap_or("0"), 16).unwrap_or(0);
                    i += p + 1;
                    if c.inb.len() < i + n + 2 {
                        return;
                    }
                    b.extend_from_slice(&c.inb[i..i + n]);
                    i += n + 2;
                    if n == 0 {
                        break;
                    }
                }
                body = b;
                used = i;
            } else {
                if c.inb.len() < he + clen {
                    return;
                }
                body = c.inb[he..he + clen].to_vec();
                used = he + clen;
            }
            c.inb.drain(..used);
            c.close_after = close;
            let mut it = first.split(' ');
            let (method, path) = (it.next().unwrap_or("").to_string(), it.next().unwrap_or("").to_string());
            self.route(id, &method, &path, &body);
        }
    }

    fn reply(&mut self, id: u32, status: &str, ctype: &str, body: &[u8]) {
        let mut o =
            format!("HTTP/1.1 {status}\r\ncontent-type: {ctype}\r\ncontent-length: {}\r\n\r\n", body.len())
                .into_bytes();
        o.extend_from_slice(body);
        self.send(id, &o);
        let c = &self.conns[id as usize];
        if c.close_after && c.out.is_empty() {
            self.drop_conn(id);
        }
    }

    fn route(&mut self, id: u32, method: &str, path: &str, body: &[u8]) {
        let (p, q) = path.split_once('?').unwrap_or((path, ""));
        const JS: &str = "application/json";
        match (method, p) {
            ("POST", "/v1/chat/completions") => self.generate(id, true, body),
            ("POST", "/v1/completions") => self.generate(id, false, body),
            ("POST", "/tokenize")
            | ("POST", "/v1/chat/completions/render")
            | ("POST", "/v1/completions/render") => {
                // vllm-router's cache_aware policy asks for these; the shapes are vLLM's, the ids are not real tokens
                let j = match parse(body) {
                    Some(j) => j,
                    None => return self.reply(id, "400 Bad Request", JS, b"{}"),
                };
                self.stats.tokenized += 1;
                let text = prompt_text(&j, j.get("messages").is_some());
                let ids: Vec<String> = text
                    .chunks(TOK)
                    .map(|c| {
                        (c.iter().fold(7u32, |h, &b| h.wrapping_mul(31).wrapping_add(b as u32)) % 100_000)
                            .to_string()
                    })
                    .collect();
                let s = if p == "/tokenize" {
                    format!(
                        "{{\"count\":{},\"max_model_len\":131072,\"tokens\":[{}],\"token_strs\":null}}",
                        ids.len(),
                        ids.join(",")
                    )
                } else {
                    format!(
                        "{{\"request_id\":\"render-{}\",\"token_ids\":[{}],\"sampling_params\":{{}},\"model\":{}}}",
                        self.stats.tokenized, ids.join(","), esc(&self.config.model)
                    )
                };
                self.reply(id, "200 OK", JS, s.as_bytes())
            }
            ("GET", "/health") | ("GET", "/health_generate") | ("GET", "/ping") => {
                self.reply(id, "200 OK", JS, b"{}")
            }
            ("GET", "/v1/models") => {
                let m = esc(&self.config.model);
                let s = format!(
                    "{{\"object\":\"list\",\"data\":[{{\"id\":{m},\"object\":\"model\",\"created\":1700000000,\"owned_by\":\"peerbench\",\"root\":{m},\"parent\":null,\"max_model_len\":131072}}]}}"
                );
                self.reply(id, "200 OK", JS, s.as_bytes())
            }
            ("GET", "/version") => self.reply(id, "200 OK", JS, b"{\"version\":\"0.11.0\"}"),
            ("GET", "/get_model_info")
            | ("GET", "/model_info")
            | ("GET", "/get_server_info")
            | ("GET", "/server_info") => {
                let m = esc(&self.config.model);
                let s = format!(
                    "{{\"model_path\":{m},\"tokenizer_path\":{m},\"served_model_name\":{m},\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.0\",\"max_running_requests\":1024,\"internal_states\":[{{}}]}}"
                );
                self.reply(id, "200 OK", JS, s.as_bytes())
            }
            ("GET", "/metrics") => {
                let s = self.metrics();
                self.reply(id, "200 OK", "text/plain; version=0.0.4", s.as_bytes())
            }
            (_, "/sim/stats") => {
                let t = &self.stats;
                let s = format!(
                    "{{\"requests\":{},\"finished\":{},\"aborted\":{},\"bad\":{},\"no_route\":{},\"tokenized\":{},\"events\":{},\"prompt_tokens\":{},\"cached_tokens\":{},\"generated_tokens\":{},\"running\":{},\"waiting\":{},\"peak_running\":{},\"connections\":{},\"cache_used\":{}}}",
                    t.requests, t.finished, t.aborted, t.bad, t.no_route, t.tokenized, t.events, t.prompt_toks, t.cached_toks, t.gen_toks,
                    self.running, self.waiting.len(), t.peak_running, t.conns, self.lru.map.len()
                );
                self.reply(id, "200 OK", JS, s.as_bytes())
            }
            (_, "/sim/reset") => {
                self.stats = Stats::default();
                self.lru = Lru::new(self.config.cache_blocks);
                self.reply(id, "200 OK", JS, b"{}")
            }
            (_, "/sim/config") => {
                let mut ok = true;
                for kv in q.split('&').filter(|s| !s.is_empty()) {
                    let (k, v) = kv.split_once('=').unwrap_or((kv, ""));
                    ok &= self.config.set(k, v);
                }
                if self.lru.cap != self.config.cache_blocks {
                    self.lru = Lru::new(self.config.cache_blocks);
                }
                self.reply(id, if ok { "200 OK" } else { "400 Bad Request" }, JS, b"{}")
            }
            _ => {
                self.unknown += 1;
                self.stats.no_route += 1;
                if self.unknown <= 20 {
                    eprintln!("fake engine: no route for {method} {path}");
                }
                self.reply(
                    id,
                    "404 Not Found",
                    JS,
                    b"{\"error\":{\"message\":\"no such route\",\"type\":\"NotFound\",\"code\":404}}",
                )
            }
        }
    }

    fn metrics(&self) -> String {
        let l = format!("{{model_name=\"{}\",engine=\"0\"}}", self.config.model);
        let total =
            if self.config.cache_blocks > 0 { self.config.cache_blocks } else { self.config.kv_blocks };
        let kv = (self.kv_used as f64 / total as f64).min(1.0);
        let mut s = String::new();
        let mut put = |name: &str, kind: &str, v: f64| {
            let _ = writeln!(s, "# HELP {name} fake engine\n# TYPE {name} {kind}\n{name}{l} {v}");
        };
        put("vllm:num_requests_running", "gauge", self.running as f64);
        put("vllm:num_requests_waiting", "gauge", self.waiting.len() as f64);
        put("vllm:kv_cache_usage_perc", "gauge", kv);
        put("vllm:gpu_cache_usage_perc", "gauge", kv);
        put("vllm:prefix_cache_queries_total", "counter", self.stats.prompt_toks as f64);
        put("vllm:prefix_cache_hits_total", "counter", self.stats.cached_toks as f64);
        put("vllm:gpu_prefix_cache_queries_total", "counter", self.stats.prompt_toks as f64);
        put("vllm:gpu_prefix_cache_hits_total", "counter", self.stats.cached_toks as f64);
        put("vllm:prompt_tokens_total", "counter", self.stats.prompt_toks as f64);
        put("vllm:generation_tokens_total", "counter", self.stats.gen_toks as f64);
        put("peerbench:requests_aborted_total", "counter", self.stats.aborted as f64);
        put("peerbench:requests_total", "counter", self.stats.requests as f64);
        s
    }

    fn generate(&mut self, id: u32, chat: bool, body: &[u8]) {
        let j = match parse(body) {
            Some(j) => j,
            None => {
                self.stats.bad += 1;
                return self.reply(
                    id,
                    "400 Bad Request",
                    "application/json",
                    b"{\"error\":{\"message\":\"bad JSON\",\"type\":\"BadRequestError\",\"code\":400}}",
                );
            }
        };
        self.stats.requests += 1;
        let text = prompt_text(&j, chat);
        let tokens = j
            .get("max_completion_tokens")
            .and_then(|x| x.num())
            .or_else(|| j.get("max_tokens").and_then(|x| x.num()))
            .map(|f| f as u32)
            .unwrap_or(self.config.tokens)
            .max(1);
        let stream = j.get("stream").map(|s| s.is_true()).unwrap_or(false);
        let usage = j
            .get("stream_options")
            .and_then(|o| o.get("include_usage"))
            .map(|u| u.is_true())
            .unwrap_or(false);
        let (mut blocks, mut tail) = (Vec::new(), Vec::new());
        if self.config.cache_blocks > 0 || self.config.prefill_us > 0 {
            chain(0, &text, &mut blocks);
            tail = text[blocks.len() * BLOCK..].to_vec();
        }
        let rid = self.next_id;
        self.next_id += 1;
        let seed = (rid % 26) as u8;
        let mut ev = Vec::new();
        let mut patch = 0;
        if stream {
            let (pre, post) = if chat {
                (
                    format!("data: {{\"id\":\"chatcmpl-{rid:016x}\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"{}\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"", self.config.model),
                    "\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n",
                )
            } else {
                (
                    format!("data: {{\"id\":\"cmpl-{rid:016x}\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"{}\",\"choices\":[{{\"index\":0,\"text\":\"", self.config.model),
                    "\",\"logprobs\":null,\"finish_reason\":null}]}\n\n",
                )
            };
            let n = pre.len() + TOK + post.len();
            ev.extend_from_slice(format!("{n:x}\r\n").as_bytes());
            ev.extend_from_slice(pre.as_bytes());
            patch = ev.len();
            ev.extend_from_slice(b"    ");
            ev.extend_from_slice(post.as_bytes());
            ev.extend_from_slice(b"\r\n");
        }
        let c = &mut self.conns[id as usize];
        let gen = c.gen;
        c.req = Some(Box::new(Request {
            stream,
            chat,
            usage,
            tokens,
            sent: 0,
            seed,
            id: rid,
            prompt_toks: text.len() / TOK,
            cached_toks: 0,
            kv: text.len() / BLOCK + 1 + tokens as usize / 16,
            blocks,
            tail,
            itl_us: self.config.itl_us,
            started: false,
            head_sent: false,
            ev,
            patch,
        }));
        if self.config.max_running > 0 && self.running >= self.config.max_running {
            self.waiting.push_back((id, gen));
        } else {
            self.start(id);
        }
    }

    fn start(&mut self, id: u32) {
        let now = now_us();
        self.running += 1;
        self.stats.peak_running = self.stats.peak_running.max(self.running);
        let gen = self.conns[id as usize].gen;
        let mut r = self.conns[id as usize].req.take().unwrap();
        r.started = true;
        self.kv_used += r.kv;
        let hit = self.lru.prefix_len(&r.blocks);
        self.lru.put(&r.blocks);
        r.cached_toks = hit * (BLOCK / TOK);
        self.stats.prompt_toks += r.prompt_toks as u64;
        self.stats.cached_toks += r.cached_toks as u64;
        let work = (r.blocks.len() - hit) as u64 * self.config.prefill_us;
        let mut at = now + work;
        if self.config.serial && work > 0 {
            self.busy_until = self.busy_until.max(now) + work;
            at = self.busy_until;
        }
        at += self.config.ttft_us;
        if !r.stream {
            at += r.itl_us * (r.tokens as u64 - 1);
        }
        let (stream, wait) = (r.stream, at > now);
        r.head_sent = stream && wait;
        self.conns[id as usize].req = Some(r);
        if stream && wait {
            self.send(id, HEAD); // as uvicorn does: the head goes out before the first token
        }
        if wait {
            self.timers.push(Reverse((at, id, gen)));
        } else {
            self.ready.push_back((id, gen));
        }
    }

    /// The next output of a request is due (at `due`).
    fn step(&mut self, id: u32, due: u64, now: u64) {
        let mut r = self.conns[id as usize].req.take().unwrap();
        if !r.stream {
            let body = self.whole(&r);
            self.stats.events += 1;
            self.finish(&r);
            self.reply(id, "200 OK", "application/json", body.as_bytes());
            if self.conns[id as usize].open {
                self.pump(id);
            }
            return;
        }
        let t = tok(r.seed, r.sent);
        let p = r.patch;
        r.ev[p..p + TOK].copy_from_slice(&t);
        self.stats.events += 1;
        let last = r.sent + 1 == r.tokens;
        if r.sent > 0 && !last {
            self.send(id, &r.ev);
        } else {
            let mut o = Vec::with_capacity(1024);
            if r.sent == 0 {
                if !r.head_sent {
                    o.extend_from_slice(HEAD);
                }
                if r.chat {
                    let s = format!(
                        "data: {{\"id\":\"chatcmpl-{:016x}\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"{}\",\"choices\":[{{\"index\":0,\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n",
                        r.id, self.config.model
                    );
                    chunk(&mut o, s.as_bytes());
                    self.stats.events += 1;
                }
            }
            if last {
                let whole = String::from_utf8_lossy(&r.ev).into_owned();
                let body = whole.split_once("\r\n").unwrap().1.trim_end_matches("\r\n");
                let fin = body.replace("\"finish_reason\":null", "\"finish_reason\":\"length\"");
                chunk(&mut o, format!("{}\n\n", fin.trim_end()).as_bytes());
                if r.usage {
                    let s = format!(
                        "data: {{\"id\":\"{}-{:016x}\",\"object\":\"{}\",\"created\":1700000000,\"model\":\"{}\",\"choices\":[],\"usage\":{}}}\n\n",
                        if r.chat { "chatcmpl" } else { "cmpl" }, r.id,
                        if r.chat { "chat.completion.chunk" } else { "text_completion" },
                        self.config.model, usage(&r)
                    );
                    chunk(&mut o, s.as_bytes());
                    self.stats.events += 1;
                }
                chunk(&mut o, b"data: [DONE]\n\n");
                o.extend_from_slice(b"0\r\n\r\n");
            } else {
                o.extend_from_slice(&r.ev);
            }
            self.send(id, &o);
        }
        r.sent += 1;
        let itl = r.itl_us;
        let c = &mut self.conns[id as usize];
        if last {
            self.finish(&r);
            let c = &self.conns[id as usize];
            if c.close_after && c.out.is_empty() {
                self.drop_conn(id);
            } else {
                self.pump(id);
            }
            return;
        }
        c.req = Some(r);
        if itl > 0 {
            // keep the schedule, but never fall behind by more than one interval
            let next = (due + itl).max(now.saturating_sub(itl));
            self.timers.push(Reverse((next, id, c.gen)));
        } else if c.outpos < c.out.len() {
            c.blocked = true;
        } else {
            self.ready.push_back((id, c.gen));
        }
    }

    fn finish(&mut self, r: &Request) {
        self.stats.finished += 1;
        self.stats.gen_toks += r.tokens as u64;
        if self.lru.cap > 0 {
            let mut t = r.tail.clone();
            for n in 0..r.tokens {
                t.extend_from_slice(&tok(r.seed, n));
            }
            let mut b = r.blocks.clone();
            chain(b.last().copied().unwrap_or(0), &t, &mut b);
            self.lru.put(&b);
        }
        self.end(r);
    }

    fn whole(&self, r: &Request) -> String {
        let mut text = String::with_capacity(r.tokens as usize * TOK);
        for n in 0..r.tokens {
            text.push_str(std::str::from_utf8(&tok(r.seed, n)).unwrap());
        }
        if r.chat {
            format!(
                "{{\"id\":\"chatcmpl-{:016x}\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"{}\",\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"{text}\"}},\"logprobs\":null,\"finish_reason\":\"length\"}}],\"usage\":{}}}",
                r.id, self.config.model, usage(r)
            )
        } else {
            format!(
                "{{\"id\":\"cmpl-{:016x}\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"{}\",\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":\"length\"}}],\"usage\":{}}}",
                r.id, self.config.model, usage(r)
            )
        }
    }
}

const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";

fn usage(r: &Request) -> String {
    format!(
        "{{\"prompt_tokens\":{},\"total_tokens\":{},\"completion_tokens\":{},\"prompt_tokens_details\":{{\"cached_tokens\":{}}}}}",
        r.prompt_toks,
        r.prompt_toks + r.tokens as usize,
        r.tokens,
        r.cached_toks
    )
}
