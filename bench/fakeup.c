/*
 * fakeup - fake OpenAI-compatible upstream (chat completions, SSE) for proxy benchmarks.
 *
 * One thread, epoll, no allocation per chunk. Build:  cc -O2 -o fakeup fakeup.c
 * Run:    ./fakeup --port 9000 [--n 500] [--rate 0]
 *
 * Behaviour is chosen per request by a control string anywhere in the request body, so that it
 * passes through any proxy that forwards the body (put it at the end of the system message; some proxies
 * drop the "user" field):
 *
 *     {"role": "system", "content": "... bench:n=500;rate=100;"}
 *
 *   n=N        number of content chunks (default --n)
 *   rate=R     chunks per second per stream; 0 = as fast as the socket takes them (default --rate)
 *   lock=1     lockstep: send the next chunk only when the client has acknowledged the one before on the
 *              side channel (a connection that starts with "ACK\n", then 4-byte little-endian stream ids;
 *              loadgen --lockstep does it). Every chunk then crosses the proxy alone, whatever the load of
 *              the machine: CPU per chunk is a service time that coalescing cannot flatter
 *   ttft=MS    delay before the first chunk
 *   abort=K    close the socket without ending the message after K chunks (upstream dies mid-stream)
 *   rst=K      the same with a TCP reset (SO_LINGER 0)
 *   err=K      after K chunks send `data: {"error":...}` + [DONE] and end the message properly
 *   stall=K    after K chunks send nothing more, keep the socket open
 *   big=MB     the second event is so many megabytes long
 *   status=S   answer S with a small JSON error body instead of a stream
 *
 * Without `"stream":true` in the body the answer is one JSON document with n tokens (unary).
 *
 * The events are those of vLLM with return_token_ids: the first has the prompt's ids, the last counts tokens.
 * Every chunk is ~1 KB: one token with its id, logprob, bytes and 5 top_logprobs, one HTTP chunk per SSE
 * event, as vLLM/uvicorn sends it. delta.content is "@T" + 16 hex digits (CLOCK_MONOTONIC ns) + 8 hex digits
 * (stream id) at the moment the chunk was handed to the socket: the load generator on the same host subtracts it
 * from its own clock (one-way latency through the proxy). Pacing follows an absolute schedule and
 * never waits for the reader (like a real engine): a slow proxy makes a backlog, not a slower source.
 *
 *   GET /__stats   JSON counters: started, completed, aborted (peer left mid-stream), active, ...
 *   GET /__reset   zero the counters
 *   GET anything   200 {"status":"ok"}
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define NVAR 512
#define BURST_BYTES (64 * 1024)
#define TS_LEN 16
#define NPROMPT 1500

typedef struct { char *buf; int len; int ts_off; int id_off; } Tmpl;
static Tmpl tmpl[NVAR];

typedef struct {
  char *p; size_t len, cap, off;
} Buf;

enum { FAIL_NONE, FAIL_ABORT, FAIL_RST, FAIL_ERR, FAIL_STALL };

typedef struct Conn {
  int fd, epout, streaming, paced, heap_i, closing, lock, is_ack;
  Buf in, out;
  size_t need;      /* bytes of the current request incl. body; 0 = header not complete */
  size_t hdr_len;
  int n, i, fail, fail_at;
  uint64_t next_ns, step_ns;
  uint32_t id;
  struct Conn *rnext;
} Conn;

#define NSTREAM 65536
static Conn *by_id[NSTREAM];
static int ep, def_n = 500;
static double def_rate = 0;
static struct { uint64_t requests, started, completed, aborted, chunks, body_bytes, conns, unary; int64_t active, last_abort_chunk; } st;
static uint32_t next_id = 1;

static inline uint64_t now_ns(void) {
  struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + t.tv_nsec;
}
static void bneed(Buf *b, size_t extra) {
  if (b->off && b->off == b->len) b->off = b->len = 0;
  if (b->len + extra > b->cap) {
    size_t c = b->cap ? b->cap : 4096;
    while (c < b->len + extra) c *= 2;
    b->p = realloc(b->p, c); b->cap = c;
  }
}
static void badd(Buf *b, const char *s, size_t n) { bneed(b, n); memcpy(b->p + b->len, s, n); b->len += n; }

/* ---- chunk templates ---------------------------------------------------- */
static uint32_t rs = 12345;
static uint32_t rnd(void) { rs ^= rs << 13; rs ^= rs >> 17; rs ^= rs << 5; return rs; }
static const char *words[] = {" the"," return"," self"," implementation"," import"," configuration","):\\n"," iterator"," range","_token_ids"," None"," arguments"," value"," exception"," not"," dataset"," results"," length"," directory"," callback"," list"," assertEqual"," print"," environment"," error"," filename"," path_join"," test"," assert"," parameters"," response"," tokenizer"};
/* Engines compute in 32 bits and print all digits of that number as a 64-bit one. */
static int add_tok(char *o, double lp) {
  const char *w = words[rnd() % (sizeof words / sizeof *words)];
  char number[32]; double exact = (float)lp;
  sprintf(number, "%.16g", exact);
  if (strtod(number, NULL) != exact) sprintf(number, "%.17g", exact);
  int n = sprintf(o, "{\"token\":\"%s\",\"logprob\":%s,\"bytes\":[", w, number);
  int first = 1;
  for (const char *c = w; *c; c++) {
    int v = (unsigned char)*c;
    if (*c == '\\') { v = 10; c++; }
    n += sprintf(o + n, "%s%d", first ? "" : ",", v); first = 0;
  }
  n += sprintf(o + n, "]");
  return n;
}
static void make_templates(void) {
  for (int v = 0; v < NVAR; v++) {
    char e[4096]; int n = 0;
    n += sprintf(e + n, "data: {\"id\":\"chatcmpl-");
    int ido = n;
    n += sprintf(e + n, "00000000\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"fake\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"@T");
    int tso = n;
    n += sprintf(e + n, "000000000000000000000000\"},\"logprobs\":{\"content\":[");
    double lp = -(double)(rnd() % 1000000) / 700001.0;
    n += add_tok(e + n, lp);
    n += sprintf(e + n, ",\"top_logprobs\":[");
    for (int k = 0; k < 5; k++) {
      if (k) e[n++] = ',';
      n += add_tok(e + n, lp - k * 1.37 - (double)(rnd() % 100000) / 77777.0);
      e[n++] = '}';
    }
    n += sprintf(e + n, "]}]},\"finish_reason\":null,\"token_ids\":[%d]}]}\n\n", (int)(rnd() % 150000));
    char h[16]; int hl = sprintf(h, "%x\r\n", n);
    char *b = malloc(hl + n + 2);
    memcpy(b, h, hl); memcpy(b + hl, e, n); memcpy(b + hl + n, "\r\n", 2);
    tmpl[v] = (Tmpl){b, hl + n + 2, hl + tso, hl + ido};
  }
}
static inline void hex(char *o, uint64_t v, int d) {
  static const char h[] = "0123456789abcdef";
  for (int i = d - 1; i >= 0; i--) { o[i] = h[v & 15]; v >>= 4; }
}
static void put_chunk(Conn *c) {
  Tmpl *t = &tmpl[(c->id * 7 + c->i) % NVAR];
  bneed(&c->out, t->len);
  char *o = c->out.p + c->out.len;
  memcpy(o, t->buf, t->len);
  hex(o + t->ts_off, now_ns(), TS_LEN);
  hex(o + t->ts_off + TS_LEN, c->id, 8);
  hex(o + t->id_off, c->id, 8);
  c->out.len += t->len; c->i++; st.chunks++;
}
static void put_http_chunk(Conn *c, const char *s) {
  char h[32]; int hl = sprintf(h, "%zx\r\n", strlen(s));
  badd(&c->out, h, hl); badd(&c->out, s, strlen(s)); badd(&c->out, "\r\n", 2);
}

/* vLLM's first event: who speaks, and the prompt's ids. `big` pads it to so many megabytes. */
static void put_first(Conn *c, long big) {
  static char first[NPROMPT * 8 + 512];
  if (!first[0]) {
    int n = sprintf(first, "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"fake\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}],\"prompt_token_ids\":[");
    for (int i = 0; i < NPROMPT; i++) n += sprintf(first + n, "%s%d", i ? "," : "", (int)(rnd() % 150000));
    sprintf(first + n, "]}\n\n");
  }
  if (big <= 0) { put_http_chunk(c, first); return; }
  size_t len = (size_t)big << 20; char *s = malloc(len + 256);
  size_t n = sprintf(s, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}],\"padding\":\"");
  memset(s + n, 'x', len); strcpy(s + n + len, "\"}\n\n");
  put_http_chunk(c, first); put_http_chunk(c, s); free(s);
}

/* ---- timer heap --------------------------------------------------------- */
static Conn **heap; static int hn, hcap;
static void hset(int i, Conn *c) { heap[i] = c; c->heap_i = i; }
static void hup(int i) { Conn *c = heap[i]; while (i > 0 && heap[(i-1)/2]->next_ns > c->next_ns) { hset(i, heap[(i-1)/2]); i = (i-1)/2; } hset(i, c); }
static void hdown(int i) {
  Conn *c = heap[i];
  for (;;) { int k = 2*i+1; if (k >= hn) break; if (k+1 < hn && heap[k+1]->next_ns < heap[k]->next_ns) k++; if (heap[k]->next_ns >= c->next_ns) break; hset(i, heap[k]); i = k; }
  hset(i, c);
}
static void hpush(Conn *c) { if (hn == hcap) { hcap = hcap ? hcap*2 : 1024; heap = realloc(heap, hcap * sizeof *heap); } heap[hn] = c; c->heap_i = hn; hn++; hup(hn-1); }
static void hdel(Conn *c) { int i = c->heap_i; if (i < 0) return; c->heap_i = -1; hn--; if (i == hn) return; hset(i, heap[hn]); hup(i); hdown(heap[i]->heap_i == i ? i : heap[i]->heap_i); }

/* ---- connection --------------------------------------------------------- */
static Conn *dead_list;          /* freed after the event batch */
static void conn_close(Conn *c, int rst) {
  if (c->closing) return;
  c->closing = 1;
  if (c->streaming) { st.active--; c->streaming = 0; }
  if (by_id[c->id % NSTREAM] == c) by_id[c->id % NSTREAM] = NULL;
  hdel(c);
  if (rst) { struct linger l = {1, 0}; setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &l, sizeof l); }
  close(c->fd);
  c->rnext = dead_list; dead_list = c;
}
static void peer_gone(Conn *c) {
  if (c->streaming) { st.aborted++; st.last_abort_chunk = c->i; }
  conn_close(c, 0);
}
static void want_out(Conn *c, int on) {
  if (c->epout == on) return;
  c->epout = on;
  struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP | (on ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &ev);
}
/* returns 0 if drained, 1 if blocked, -1 if closed */
static int flush_out(Conn *c) {
  while (c->out.off < c->out.len) {
    ssize_t w = send(c->fd, c->out.p + c->out.off, c->out.len - c->out.off, MSG_NOSIGNAL);
    if (w < 0) {
      if (errno == EAGAIN) { want_out(c, 1); return 1; }
      peer_gone(c); return -1;
    }
    c->out.off += w;
  }
  c->out.off = c->out.len = 0;
  return 0;
}
static void finish_stream(Conn *c) {
  char u[400];
  put_http_chunk(c, "data: {\"id\":\"chatcmpl-end\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"fake\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null,\"token_ids\":[]}]}\n\n");
  sprintf(u, "data: {\"id\":\"chatcmpl-end\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"fake\",\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d}}\n\n", NPROMPT, NPROMPT + c->i, c->i);
  put_http_chunk(c, u);
  put_http_chunk(c, "data: [DONE]\n\n");
  badd(&c->out, "0\r\n\r\n", 5);
  c->streaming = 0; st.active--; st.completed++;
}
/* one more chunk is due: returns 0 to go on, 1 if the stream is over or stalled, -1 if closed */
static int step(Conn *c) {
  if (c->fail && c->i >= c->fail_at) {
    switch (c->fail) {
      case FAIL_ABORT: case FAIL_RST: flush_out(c); if (!c->closing) conn_close(c, c->fail == FAIL_RST); return -1;
      case FAIL_ERR:
        put_http_chunk(c, "data: {\"error\":{\"message\":\"engine died\",\"type\":\"InternalServerError\",\"code\":500}}\n\n");
        put_http_chunk(c, "data: [DONE]\n\n"); badd(&c->out, "0\r\n\r\n", 5);
        c->streaming = 0; st.active--; st.completed++; return 1;
      case FAIL_STALL: return 1;
    }
  }
  if (c->i >= c->n) { finish_stream(c); return 1; }
  put_chunk(c);
  return 0;
}
static void pump_burst(Conn *c) {
  for (;;) {
    int r = flush_out(c);
    if (r) return;                       /* blocked: EPOLLOUT resumes; or closed */
    if (!c->streaming) break;
    int over = 0;
    while (c->out.len < BURST_BYTES) { over = step(c); if (over) break; }
    if (over < 0) return;
    if (over && c->streaming) { flush_out(c); break; }   /* stalled */
  }
  if (!c->closing) want_out(c, 0);
}
static long ctl_num(const char *b, size_t n, const char *key, long def) {
  const char *p = memmem(b, n, key, strlen(key));
  return p ? strtol(p + strlen(key), NULL, 10) : def;
}
static void unary(Conn *c, int n) {
  Buf b = {0};
  const char *h = "{\"id\":\"chatcmpl-u\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"fake\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"";
  badd(&b, h, strlen(h));
  char ts[20] = "@T"; hex(ts + 2, now_ns(), 16);
  badd(&b, ts, 18);
  const char *m = "\"},\"logprobs\":{\"content\":[";
  badd(&b, m, strlen(m));
  for (int i = 0; i < n; i++) {           /* reuse the logprob entry of the chunk template */
    Tmpl *t = &tmpl[i % NVAR];
    char *s = memmem(t->buf, t->len, "{\"content\":[", 12) + 12;
    char *e = memmem(t->buf, t->len, "]},\"finish_reason\"", 18);
    if (i) badd(&b, ",", 1);
    badd(&b, s, e - s);
  }
  char tail[256]; int tl = sprintf(tail, "]},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":%d,\"total_tokens\":%d}}", n, n + 10);
  badd(&b, tail, tl);
  char hd[200]; int hl = sprintf(hd, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", b.len);
  badd(&c->out, hd, hl); badd(&c->out, b.p, b.len); free(b.p);
  st.unary++;
}
static void simple(Conn *c, int status, const char *body) {
  char h[256]; int hl = sprintf(h, "HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", status, strlen(body));
  badd(&c->out, h, hl); badd(&c->out, body, strlen(body));
}
static void handle(Conn *c) {            /* a full request is in c->in[0..need) */
  char *h = c->in.p; size_t hl = c->hdr_len; char *b = h + hl; size_t bl = c->need - hl;
  st.requests++; st.body_bytes += bl;
  if (!strncmp(h, "GET ", 4)) {
    if (!strncmp(h + 4, "/__stats", 8)) {
      char o[512];
      sprintf(o, "{\"requests\":%lu,\"started\":%lu,\"completed\":%lu,\"aborted\":%lu,\"active\":%ld,\"chunks\":%lu,\"body_bytes\":%lu,\"conns\":%lu,\"unary\":%lu,\"last_abort_chunk\":%ld}",
        st.requests, st.started, st.completed, st.aborted, st.active, st.chunks, st.body_bytes, st.conns, st.unary, st.last_abort_chunk);
      simple(c, 200, o);
    } else if (!strncmp(h + 4, "/__reset", 8)) {
      int64_t a = st.active; memset(&st, 0, sizeof st); st.active = a; st.last_abort_chunk = -1; simple(c, 200, "{}");
    } else simple(c, 200, "{\"status\":\"ok\"}");
    flush_out(c); return;
  }
  const char *ctl = memmem(b, bl, "bench:", 6);
  size_t cl = ctl ? (size_t)(b + bl - ctl) : 0;
  if (cl > 200) cl = 200;
  if (ctl) { const char *q = memchr(ctl, '"', cl); if (q) cl = q - ctl; }
  c->n = ctl_num(ctl, cl, "n=", def_n);
  double rate = ctl_num(ctl, cl, "rate=", (long)def_rate);
  c->lock = ctl_num(ctl, cl, "lock=", 0);
  long ttft = ctl_num(ctl, cl, "ttft=", 0), status = ctl_num(ctl, cl, "status=", 0);
  c->fail = FAIL_NONE; c->i = 0;
  const char *fk[] = {0, "abort=", "rst=", "err=", "stall="};
  for (int f = 1; f <= 4; f++) { long k = ctl_num(ctl, cl, fk[f], -1); if (k >= 0) { c->fail = f; c->fail_at = k; } }
  if (status) { simple(c, status, "{\"error\":{\"message\":\"refused by fake upstream\",\"type\":\"BadRequestError\",\"code\":400}}"); flush_out(c); return; }
  if (!memmem(b, bl, "\"stream\":true", 13) && !memmem(b, bl, "\"stream\": true", 14)) { unary(c, c->n); flush_out(c); return; }
  c->id = next_id++; c->streaming = 1; st.started++; st.active++;
  const char *rh = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
  badd(&c->out, rh, strlen(rh));
  put_first(c, ctl_num(ctl, cl, "big=", 0));
  if (c->lock) { by_id[c->id % NSTREAM] = c; c->paced = 1; step(c); flush_out(c); return; }
  if (rate > 0 || ttft > 0) {
    c->paced = 1; c->step_ns = rate > 0 ? (uint64_t)(1e9 / rate) : 0;
    c->next_ns = now_ns() + (uint64_t)ttft * 1000000ull;
    if (!ttft) { step(c); c->next_ns += c->step_ns; }   /* first chunk goes with the headers */
    if (flush_out(c) >= 0 && c->streaming) hpush(c);
  } else { c->paced = 0; pump_burst(c); }
}
static void acks(Conn *c) {
  size_t o = 0;
  for (; o + 4 <= c->in.len; o += 4) {
    uint32_t id; memcpy(&id, c->in.p + o, 4);
    Conn *s = by_id[id % NSTREAM];
    if (s && s->id == id && s->streaming && !s->closing && step(s) >= 0 && !s->epout) flush_out(s);
  }
  memmove(c->in.p, c->in.p + o, c->in.len - o); c->in.len -= o;
}
static void on_input(Conn *c) {
  for (;;) {
    bneed(&c->in, 65536);
    ssize_t r = recv(c->fd, c->in.p + c->in.len, c->in.cap - c->in.len, 0);
    if (r == 0) { peer_gone(c); return; }
    if (r < 0) { if (errno == EAGAIN) break; peer_gone(c); return; }
    c->in.len += r;
  }
  if (!c->is_ack && c->in.len >= 4 && !memcmp(c->in.p, "ACK\n", 4)) { c->is_ack = 1; memmove(c->in.p, c->in.p + 4, c->in.len - 4); c->in.len -= 4; }
  if (c->is_ack) { acks(c); return; }
  while (!c->closing && !c->streaming && c->in.len) {
    if (!c->need) {
      char *e = memmem(c->in.p, c->in.len, "\r\n\r\n", 4);
      if (!e) return;
      c->hdr_len = e + 4 - c->in.p;
      size_t body = 0; int expect = 0;
      for (char *p = c->in.p; p < e; ) {
        char *nl = memmem(p, e + 2 - p, "\r\n", 2); if (!nl) break;
        if (nl - p > 15 && !strncasecmp(p, "content-length:", 15)) body = strtoul(p + 15, NULL, 10);
        if (nl - p > 7 && !strncasecmp(p, "expect:", 7)) expect = 1;
        p = nl + 2;
      }
      c->need = c->hdr_len + body;
      if (expect) { badd(&c->out, "HTTP/1.1 100 Continue\r\n\r\n", 25); flush_out(c); }
    }
    if (c->in.len < c->need) return;
    handle(c);
    if (c->closing) return;
    memmove(c->in.p, c->in.p + c->need, c->in.len - c->need);
    c->in.len -= c->need; c->need = 0;
  }
}
int main(int argc, char **argv) {
  int port = 9000;
  for (int i = 1; i < argc - 1; i += 2) {
    if (!strcmp(argv[i], "--port")) port = atoi(argv[i+1]);
    else if (!strcmp(argv[i], "--n")) def_n = atoi(argv[i+1]);
    else if (!strcmp(argv[i], "--rate")) def_rate = atof(argv[i+1]);
  }
  signal(SIGPIPE, SIG_IGN);
  make_templates();
  int ls = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(ls, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(ls, (void *)&a, sizeof a) || listen(ls, 4096)) { perror("bind"); return 1; }
  ep = epoll_create1(0);
  struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};
  epoll_ctl(ep, EPOLL_CTL_ADD, ls, &ev);
  double avg = 0; for (int i = 0; i < NVAR; i++) avg += tmpl[i].len;
  fprintf(stderr, "fakeup on 127.0.0.1:%d, mean chunk %.0f bytes\n", port, avg / NVAR);
  struct epoll_event evs[1024];
  for (;;) {
    struct timespec ts, *tp = NULL;
    if (hn) {
      uint64_t t = now_ns(), d = heap[0]->next_ns > t ? heap[0]->next_ns - t : 0;
      ts.tv_sec = d / 1000000000ull; ts.tv_nsec = d % 1000000000ull; tp = &ts;
    }
    int n = epoll_pwait2(ep, evs, 1024, tp, NULL);
    for (int i = 0; i < n; i++) {
      Conn *c = evs[i].data.ptr;
      if (!c) {
        int fd;
        while ((fd = accept4(ls, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
          setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
          c = calloc(1, sizeof *c); c->fd = fd; c->heap_i = -1; st.conns++;
          struct epoll_event e2 = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
          epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e2);
        }
        continue;
      }
      if (c->closing) continue;
      uint32_t e = evs[i].events;
      if (e & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) { on_input(c); if (c->closing) continue; }
      if (e & EPOLLOUT) {
        if (c->streaming && !c->paced) pump_burst(c);
        else if (flush_out(c) == 0) want_out(c, 0);
      }
    }
    uint64_t t = hn ? now_ns() : 0;
    while (hn && heap[0]->next_ns <= t) {
      Conn *c = heap[0];
      int over;
      do { over = step(c); c->next_ns += c->step_ns; } while (!over && c->next_ns <= t && c->step_ns);
      if (over < 0) continue;
      if (over || !c->step_ns) hdel(c); else hdown(0);
      if (!c->epout && flush_out(c) < 0) continue;
      if (!over && !c->step_ns && c->streaming) { c->paced = 0; pump_burst(c); }
    }
    while (dead_list) { Conn *c = dead_list; dead_list = c->rnext; free(c->in.p); free(c->out.p); free(c); }
  }
}
